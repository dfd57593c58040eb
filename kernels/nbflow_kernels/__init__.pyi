"""Types of the public names; `nbflow_kernels.op_registry` lists them."""

from nbflow_kernels.activation import *
from nbflow_kernels.attention import *
from nbflow_kernels.attention import single_prefill_with_kv_cache as single_prefill_with_kv_cache
from nbflow_kernels.convolution import *
from nbflow_kernels.cpu.parallel_for import get_num_threads as get_num_threads
from nbflow_kernels.cpu.parallel_for import set_num_threads as set_num_threads
from nbflow_kernels.delta_rule import *
from nbflow_kernels.embedding import *
from nbflow_kernels.errors import MissingExtraError as MissingExtraError
from nbflow_kernels.errors import UsageError as UsageError
from nbflow_kernels.formats import FORMATS as FORMATS
from nbflow_kernels.formats import QuantFormat as QuantFormat
from nbflow_kernels.formats import QuantTensor as QuantTensor
from nbflow_kernels.formats import dequantize as dequantize
from nbflow_kernels.formats.user import register_format as register_format
from nbflow_kernels.formats.user import unregister_format as unregister_format
from nbflow_kernels.gating import *
from nbflow_kernels.hadamard import *
from nbflow_kernels.kv_cache import *
from nbflow_kernels.linear_attention import *
from nbflow_kernels.logits import *
from nbflow_kernels.masks import *
from nbflow_kernels.matmul import *
from nbflow_kernels.moe import *
from nbflow_kernels.norm import *
from nbflow_kernels.penalties import *
from nbflow_kernels.plugins import load_plugin as load_plugin
from nbflow_kernels.plugins import loaded_plugins as loaded_plugins
from nbflow_kernels.position import *
from nbflow_kernels.position import rope_quantize_fp8 as rope_quantize_fp8
from nbflow_kernels.product_keys import *
from nbflow_kernels.quantized_matmul import qmatmul as qmatmul
from nbflow_kernels.quantizers import quantize as quantize
from nbflow_kernels.row_statistics import *
from nbflow_kernels.sampling import *
from nbflow_kernels.sparse import *
from nbflow_kernels.state_space import *
from nbflow_kernels.testing.format_checks import check_format as check_format

__all__: list[str]

# second names, `op_registry.ALIASES`
mla_rope_quantize_fp8 = rope_quantize_fp8
single_prefill_with_kv_cache_return_lse = single_prefill_with_kv_cache
