from math import inf, isnan, nan

import pytest

from gearshift.tests.helpers.kernel_checks import worst


@pytest.mark.parametrize("errors", [(nan, 0.0), (0.0, nan), (nan, inf), (1.0, nan, 2.0)])
def test_an_error_that_is_no_number_is_not_passed_over(errors: tuple[float, ...]) -> None:
    assert isnan(worst(*errors))


def test_the_worst_error_is_the_greatest() -> None:
    assert worst(0.5, -0.25, 2.0) == 2.0
