"""Values of a data set as JSON can hold them: what reward functions get, in whichever process they run."""

from __future__ import annotations

import datetime
import decimal
import math
from typing import Any


def json_value(value: Any) -> Any:
    """The value with dates and times in ISO form, durations in seconds, decimals as floats, NaN as None, tuples as lists."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value  # pandas writes a missing number as NaN
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    return _from_rare_type(value)


def _from_rare_type(value: Any) -> Any:
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return float(value)
    if hasattr(value, "tolist"):  # numpy, from formatted datasets and half-precision columns
        return json_value(value.tolist())
    return str(value)
