from __future__ import annotations

import re
from pathlib import Path

import pytest

from mxpool import errors
from mxpool.cli import exits

CODES = {
    errors.ConfigInvalid: exits.USAGE,
    errors.BrokerLost: exits.UNREACHABLE,
    errors.UnknownModel: exits.REFUSED,
    errors.PermissionDenied: exits.REFUSED,
    errors.QueueFull: exits.REFUSED,
    errors.ModelUnavailable: exits.REFUSED,
    errors.DeadlineExceeded: exits.FAILURE,
    errors.RunFailed: exits.FAILURE,
    errors.ModelInvalid: exits.FAILURE,
    errors.EndpointInUse: exits.FAILURE,
}
PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


@pytest.mark.parametrize(("error", "code"), CODES.items())
def test_each_error_has_the_exit_code_of_its_kind(error: type[errors.MxPoolError], code: int) -> None:
    assert exits.exit_code(error("text")) == code


def test_the_page_lists_the_exit_codes_that_the_programs_use() -> None:
    used = {exits.OK, exits.FAILURE, exits.USAGE, exits.UNREACHABLE, exits.REFUSED}
    listed = {int(code) for code in re.findall(r"^\| (\d) \|", PAGE.read_text(), re.MULTILINE)}
    assert listed == used
