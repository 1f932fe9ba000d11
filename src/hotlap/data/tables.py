"""Records of Parquet and Arrow files: columns on disk, rows for us. The only module that loads pyarrow."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotlap.data.records import Record, Rows
from hotlap.errors import BadData, MissingArtifact

_BATCH_ROWS = 1000


def parquet_rows(path: Path) -> Rows:
    """
    Raises:
        BadData: it is no Parquet file.
    """
    with _arrow(path) as pa:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path, memory_map=False, pre_buffer=False) as file:
            yield from _records(pa, file.iter_batches(batch_size=_BATCH_ROWS))


def arrow_rows(path: Path) -> Rows:
    """An Arrow file, in the stream format that `save_to_disk` writes or in the file format.

    Raises:
        BadData: it is neither.
    """
    with _arrow(path) as pa, path.open("rb") as file:
        is_file_format = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file_format:
            reader: Any = pa.ipc.open_file(file)
            batches: Iterator[Any] = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(file))
        yield from _records(pa, batches)


def num_rows(path: Path) -> int:
    """How many rows a Parquet file says it has."""
    with _arrow(path):
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(path).num_rows


def _records(pa: Any, batches: Iterator[Any]) -> Rows:
    row = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            for value in batch.slice(start, _BATCH_ROWS).to_pylist():
                row += 1
                yield Record(value, row, "row")


@contextmanager
def _arrow(path: Path) -> Generator[Any]:
    """pyarrow, and its errors as ours."""
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingArtifact(f"{path} needs pyarrow. Run: pip install 'hotlap[train]'") from None
    try:
        yield pa
    except (pa.ArrowException, UnicodeDecodeError) as error:
        first = str(error).partition("\n")[0]
        raise BadData(f"{path} cannot be read: {first} Write it again, or check that it was copied whole.") from None
