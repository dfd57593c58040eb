"""Grids of GGML's i-quants: vector-quantization codebooks of weight magnitudes.

A grid is a subset of the points of {0, 1, 2}**8 (iq1, iq2) or {0..7}**4 (iq3), whose coordinates
are codes of magnitudes.  Blocks store the index of a point in ascending order, the first coordinate
being the least significant.

==================  ======  =======  ==============================================================
grid                points  cube     coordinate stands for
==================  ======  =======  ==============================================================
`GRID_IQ1`          2048    3**8     -1, 0, 1 (before the shift of 1/8)
`GRID_IQ2_XXS`      256     3**8     8, 25, 43
`GRID_IQ2_XS`       512     3**8     8, 25, 43
`GRID_IQ2_S`        1024    3**8     8, 25, 43
`GRID_IQ3_XXS`      256     8**4     4, 12, 20, 28, 36, 44, 52, 62
`GRID_IQ3_S`        512     8**4     1, 3, 5, 7, 9, 11, 13, 15
==================  ======  =======  ==============================================================

Grids are embedded as bit maps over the cube (bit i of byte b: point 8b + i), deflated, in base 85.

Source: GGML, ggml-common.h (iq1s_grid to iq3s_grid).
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd, simd_memory
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.bit_fields import unpack_field
from nbflow_kernels.formats.block_format import DECODE_COST, BlockFormat
from nbflow_kernels.formats.registry import Bytes, Halves
from nbflow_kernels.formats.unpack_rows import Unpacking, spread_8, unpack_rows, unpacking

Grid = NDArray[np.uint16]
"""Points of a grid, ascending: 8 coordinates of 2 bits or 4 of 3 bits, the first lowest."""


def _points(levels: int, dimensions: int, bit_map: str) -> Grid:
    """Decode the points of a grid from its embedded bit map."""
    bits = np.frombuffer(zlib.decompress(base64.b85decode(bit_map)), np.uint8)
    number = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    width = 2 if levels == 3 else 3
    points = np.zeros(len(number), np.uint16)
    for i in range(dimensions):
        points |= (number // levels**i % levels << width * i).astype(np.uint16)
    points.setflags(write=False)
    return points


def coordinates(points: NDArray[np.uint16], dimensions: int) -> Bytes:
    """Return the coordinates (n, groups * dimensions) of points (n, groups)."""
    width = 2 if dimensions == 8 else 3
    shifts = width * np.arange(dimensions, dtype=np.uint16)
    digits = (points[:, :, None] >> shifts) & np.uint16(2**width - 1)
    result: Bytes = digits.astype(np.uint8).reshape(len(points), -1)
    return result


def signs_of_seven(bits: Bytes) -> Bytes:
    """Return bytes of 8 signs from 7 stored ones; the eighth makes the parity even."""
    folded = bits ^ (bits >> np.uint8(4))
    folded ^= folded >> np.uint8(2)
    folded ^= folded >> np.uint8(1)
    signs: Bytes = bits | (folded << np.uint8(7))
    return signs


# ---- the grids ----------------------------------------------------------------------------------


GRID_IQ1 = _points(
    3,
    8,
    "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umM"
    "k2dT8mb2WdTox*h^v8VtnDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;"
    "QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R"
    "@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^mWiJv*28-WD<$YEG%"
    "#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXv"
    "Hn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#"
    "9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@"
    "uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}"
    "uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEM"
    "lIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1",
)

GRID_IQ2_XXS = _points(
    3,
    8,
    "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn"
    "6;is&dxI!#Zg_{KuzkVd4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrz"
    "cFbHqcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gb"
    "lzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7",
)

GRID_IQ2_XS = _points(
    3,
    8,
    "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&("
    "-c)w(<-fCU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p="
    "RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+"
    "$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx4=M73#xoc?jNErTm"
    "D?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC",
)

GRID_IQ2_S = _points(
    3,
    8,
    "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&"
    "YfEj@sgh^u5FBBgC>LAkBEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!"
    "2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW"
    "*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OBC|vDii4FoWN_zK9m"
    "?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6",
)

GRID_IQ3_XXS = _points(
    8,
    4,
    "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHo"
    "X-c)&}FY<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS"
    "3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydl"
    "NePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5",
)

GRID_IQ3_S = _points(
    8,
    4,
    "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkw"
    "q!%0~0(%@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q("
    "AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+"
    "CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X"
    "$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>",
)


# ---- formats ------------------------------------------------------------------------------------


class OnGrid(NamedTuple):
    """Rows of weights quantized to a grid."""

    points: NDArray[np.uint16]
    """(rows, K / dimensions of the grid)."""
    signs: Bytes
    """(rows, K / 8): bit j for weight j of 8, 1 for negative."""
    scales: Bytes
    """(rows, K / sub_block): s for the scale 2s + 1."""
    d: Halves
    """(rows, K / 256)."""


@jit.kernel
def _decode_grid(points, signs, grid, dimensions, sign_bits, codes, start, stop):
    """Write codes of rows [start, stop): a grid coordinate in the low bits, the sign above."""
    per_sign = codes.shape[1] // signs.shape[1] // 8  # groups of eight weights
    for r in range(start, stop):
        to = simd.address(codes) + r * codes.strides[0]
        for i in range(codes.shape[1] // 8):
            sign = np.int64(signs[r, i // per_sign])
            if sign_bits == 1:  # of all eight
                sign *= 255
            elif sign_bits == 7:  # the eighth sign makes the parity even
                folded = sign ^ (sign >> 4)
                folded ^= folded >> 2
                sign |= ((folded ^ (folded >> 1)) & 1) << 7
            if dimensions == 8:
                eight = spread_8(np.int64(grid[points[r, i]]), 2) | (spread_8(sign, 1) << 2)
            else:
                both = np.int64(grid[points[r, 2 * i]]) | np.int64(grid[points[r, 2 * i + 1]]) << 12
                eight = spread_8(both, 3) | (spread_8(sign, 1) << 3)
            simd_memory.write_i64(to + 8 * i, eight)


@dataclass(frozen=True, eq=False, repr=False)
class GridFormat(BlockFormat):
    """Vector-quantized block format with the fields "point", "sign", "scale" and "d"."""

    grid: Grid

    @property
    def dimensions(self) -> int:
        """Weights per point: 4 or 8."""
        return self.block_size // self.fields["point"].n

    @cached_property
    def unpacking(self) -> Unpacking:
        """Constants of `unpack_rows`: points, scales, signs."""
        scale, _ = self._scale_fields()
        point, sign = self.fields["point"], self.fields["sign"]
        return unpacking(self.block_bytes, (point, 2), scale, (sign, 1))

    def _unpack(self, rows: Bytes, scales: NDArray[np.int16], mins: Bytes) -> Bytes:
        """See `FieldFormat._unpack`."""
        n_blocks, n_columns = rows.shape[1] // self.block_bytes, self.block_size
        codes = np.empty((len(rows), n_blocks * n_columns), np.uint8)
        points = np.empty((len(rows), n_blocks * self.fields["point"].n), np.uint16)
        signs = np.empty((len(rows), n_blocks * self.fields["sign"].n), np.uint8)
        outs, work = (points, scales, signs), DECODE_COST * codes.size
        unpack_rows(rows, self.block_bytes, self.unpacking, outs, work)
        parallel_for(
            _decode_grid, len(rows), 2.0 * codes.size,
            points, signs, self.grid, self.dimensions, self.fields["sign"].bits, codes,
        )  # fmt: skip
        return codes

    def unpack_codes(self, blocks: Bytes) -> Bytes:
        """See `FieldFormat.unpack_codes`."""
        points = self.grid[unpack_field(self.fields["point"], blocks)]
        signs = unpack_field(self.fields["sign"], blocks).astype(np.uint8)
        if self.fields["sign"].bits == 7:
            signs = signs_of_seven(signs)
        if self.fields["sign"].bits > 1:
            signs = np.unpackbits(signs, axis=1, bitorder="little")
        codes = coordinates(points, self.dimensions)
        signs = np.repeat(signs, self.block_size // signs.shape[1], axis=1)
        codes |= signs << np.uint8(2 if self.dimensions == 8 else 3)
        return codes

    def pack_rows(self, rows: OnGrid) -> Bytes:
        """Pack rows quantized to the grid into bytes."""
        signs = rows.signs.reshape(-1, self.fields["sign"].n, 32 // self.fields["sign"].n)[:, :, 0]
        signs = signs.reshape(len(rows.signs), -1)
        return self.pack_blocks(point=rows.points, sign=signs, scale=rows.scales, d=rows.d)
