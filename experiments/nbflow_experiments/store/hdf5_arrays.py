"""HDF5 arrays of a point and of its MPI ranks.

Under mpirun every rank writes its own file, and the other files link to it::

    points/<id>/arrays.rank0.h5      decode_s, prefill_s, ... of rank 0, written by it
    points/<id>/arrays.rank1.h5
    points/<id>/arrays.h5            ranks/0, ranks/1: external links to them
                                     decode_s_by_rank (ranks, repetitions): a virtual dataset
    results.h5                       points/<id>/...: the same links

No rank needs an MPI build of HDF5, and readers see one file.  Links are relative, so the results
folder can be moved as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nbflow.utils.atomic_write import replace_atomically
from nbflow_experiments.measures import Array
from nbflow_experiments.optional_packages import require
from nbflow_experiments.store.json_files import DamagedFileError

_LINKS, _BY_RANK = "ranks", "_by_rank"


def write_arrays(group: Any, arrays: Mapping[str, Array]) -> None:
    """Write arrays as HDF5 datasets with their unit, note and labels as attributes."""
    h5py = require("h5py")
    for name, array in arrays.items():
        dataset = group.create_dataset(name, data=np.asarray(array.values))
        dataset.attrs["unit"] = array.unit
        dataset.attrs["note"] = array.note
        if array.labels:
            labels = group.create_dataset(
                f"{name}_labels", data=list(array.labels), dtype=h5py.string_dtype()
            )
            labels.make_scale("label")
            dataset.dims[0].attach_scale(labels)


def open_arrays(path: Path) -> Any:
    """Open an HDF5 file of a sweep for reading."""
    try:
        return require("h5py").File(path, "r")
    except OSError as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from None


def rank_file(rank: int) -> str:
    """Return the file name of a rank's arrays."""
    return f"arrays.rank{rank}.h5"


def write_rank_file(folder: Path, rank: int, arrays: Mapping[str, Array]) -> None:
    """Write the arrays of this rank."""
    h5py = require("h5py")
    with (
        replace_atomically(folder / rank_file(rank)) as temporary,
        h5py.File(temporary, "w", track_order=True) as file,
    ):
        file.attrs["rank"] = rank
        write_arrays(file, arrays)


def remove_rank_files(folder: Path) -> None:
    """Remove the rank files of an earlier attempt."""
    for path in folder.glob("arrays.rank*.h5"):
        path.unlink(missing_ok=True)


def link_ranks(group: Any, folder: Path, ranks: Sequence[int]) -> None:
    """Link the files of ranks into a group of another file."""
    h5py = require("h5py")
    # relative to the file that links
    names = {rank: _relative(group, folder / rank_file(rank)) for rank in ranks}
    links = group.create_group(_LINKS, track_order=True)
    for rank, name in names.items():
        links[str(rank)] = h5py.ExternalLink(name, "/")
    found: dict[str, dict[int, Any]] = {}
    for rank in ranks:
        with open_arrays(folder / rank_file(rank)) as file:
            for key, dataset in file.items():
                if "unit" in dataset.attrs:  # skips label datasets
                    about = dataset.shape, dataset.dtype, dict(dataset.attrs)
                    found.setdefault(key, {})[rank] = about
    for key, of_ranks in found.items():
        shape, dtype, attributes = next(iter(of_ranks.values()))
        if len({(s, d) for s, d, _ in of_ranks.values()}) > 1:
            continue  # lengths differ between ranks: links only
        layout = h5py.VirtualLayout((len(of_ranks), *shape), dtype)
        for i, rank in enumerate(of_ranks):
            layout[i] = h5py.VirtualSource(names[rank], key, shape)
        dataset = group.create_virtual_dataset(key + _BY_RANK, layout)
        dataset.attrs["unit"] = attributes["unit"]
        dataset.attrs["note"] = f"{attributes['note']}; one row per rank of `ranks`"
        dataset.attrs["ranks"] = list(of_ranks)


def is_link(key: str) -> bool:
    """Return whether a key of a point's file was made by `link_ranks`."""
    return key == _LINKS or key.endswith(_BY_RANK)


def linked_ranks(file: Any) -> list[int]:
    """Return the ranks linked from a point's file."""
    return [int(rank) for rank in file.get(_LINKS, ())]


def _relative(group: Any, path: Path) -> str:
    """Return a path relative to the folder of the group's file."""
    folder = Path(group.file.filename).parent.absolute()
    return path.absolute().relative_to(folder).as_posix()
