"""Lists of a result as data frames, where pandas or polars is installed.

In: ``Rows``. Out: frames with the columns of ``--parquet``. Whole numbers stay whole where some are missing:
times in ns do not fit a float.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpuflow.errors import MissingError

if TYPE_CHECKING:
    from dpuflow.results import Rows


def to_pandas(rows: Rows[Any]) -> Any:
    """A ``pandas.DataFrame``."""
    try:
        import pandas as pd
    except ImportError:
        raise MissingError("to_pandas needs pandas: pip install pandas") from None
    import pyarrow as pa

    table = rows.to_arrow()
    kinds = {pa.int64(): pd.Int64Dtype(), pa.float64(): pd.Float64Dtype(), pa.string(): pd.StringDtype()}
    return table.to_pandas(types_mapper=kinds.get)


def to_polars(rows: Rows[Any]) -> Any:
    """A ``polars.DataFrame``."""
    try:
        import polars as pl
    except ImportError:
        raise MissingError("to_polars needs polars: pip install polars") from None
    return pl.from_arrow(rows.to_arrow())
