"""Tests of the copies of the planner library, which hold only the mapped part of the file."""

import ctypes
from pathlib import Path

import pytest

pytest.importorskip("alfworld")

from fast_downward import interface

from agent_system.environments.env_package.alfworld import planner


@pytest.fixture
def installed_library(monkeypatch):
    """Yield the path of the installed library, without earlier copies of this process."""
    path = Path(interface.__file__).with_name("libdownward.so")
    monkeypatch.setattr(interface, "DOWNWARD_LIB_PATH", str(path))
    planner._use_stripped_planner_library.cache_clear()
    yield path
    planner._use_stripped_planner_library.cache_clear()


def test_copies_are_smaller_and_separate_libraries(installed_library):
    first, second = planner.load_planner(), planner.load_planner()
    assert Path(interface.DOWNWARD_LIB_PATH).stat().st_size < installed_library.stat().st_size
    assert first._handle != second._handle
    addresses = {ctypes.cast(each.load_sas, ctypes.c_void_p).value for each in (first, second)}
    assert len(addresses) == 2, "equal addresses would mean shared state"


def test_stripped_library_keeps_all_mapped_bytes(installed_library):
    whole = installed_library.read_bytes()
    stripped = planner.strip_debug_info(whole)
    changed = {offset for offset, (a, b) in enumerate(zip(whole, stripped, strict=False)) if a != b}
    assert changed <= {*range(40, 48), *range(58, 64)}, (
        "only the section table reference may differ"
    )
    assert planner.strip_debug_info(stripped) == stripped


def test_file_of_another_format_is_copied_unchanged():
    assert (
        planner.strip_debug_info(b"\xcf\xfa\xed\xfe and the rest")
        == b"\xcf\xfa\xed\xfe and the rest"
    )
