"""Constants of normal distributions, by which scatter and errors are estimated from medians."""

NORMAL = 1.4826
"""Standard deviation of normal values over their median absolute deviation."""
MEDIAN = 1.2533
"""Standard error of the median of normal values over that of their mean."""
MEDIAN_ERROR = MEDIAN * NORMAL
"""Standard error of a median of normal values times the root of their number, over the median absolute deviation."""
