"""Numbers in words and in columns."""

from __future__ import annotations

import math

MINUS = "−"


def number(value: float | None, digits: int = 3) -> str:
    """The value with so many significant digits, never in powers of ten between a ten-thousandth and a billion; a dash for none.

    >>> number(0.41234), number(28.273), number(13571.2), number(-0.00042), number(2.5e-7), number(None)
    ('0.412', '28.3', '13,571', '−0.00042', '2.5e−7', '—')
    """
    if value is None or not math.isfinite(value):
        return "—"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if not -5 < size < 9:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    elif abs(value) >= 10 ** (digits - 1):
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{max(0, digits - 1 - size)}f}"
        text = text.rstrip("0").rstrip(".") if size < -1 or float(value).is_integer() else text
    return text.replace("-", MINUS)


def percent(share: float) -> str:
    """A share in percent.

    >>> percent(0.784), percent(0.004), percent(0.0), percent(1.0)
    ('78 %', '0.4 %', '0 %', '100 %')
    """
    value = share * 100
    return f"{value:.1f} %" if 0 < value < 1 else f"{value:.0f} %"
