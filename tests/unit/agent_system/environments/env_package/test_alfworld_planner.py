"""What is copied of the planner library is what is mapped of it."""

import ctypes
from pathlib import Path

import pytest

pytest.importorskip("alfworld")

from fast_downward import interface

from agent_system.environments.env_package.alfworld import planner


@pytest.fixture
def installed(monkeypatch):
    """The library as it is installed, whatever this process copied before."""
    path = Path(interface.__file__).with_name("libdownward.so")
    monkeypatch.setattr(interface, "DOWNWARD_LIB_PATH", str(path))
    planner._use_stripped_library.cache_clear()
    yield path
    planner._use_stripped_library.cache_clear()


def test_a_copy_is_short_and_works_and_each_is_another(installed):
    first, second = planner.load_planner(), planner.load_planner()
    assert Path(interface.DOWNWARD_LIB_PATH).stat().st_size < installed.stat().st_size
    assert first._handle != second._handle
    addresses = {ctypes.cast(each.load_sas, ctypes.c_void_p).value for each in (first, second)}
    assert len(addresses) == 2, "they would share their state"


def test_a_library_keeps_all_that_is_mapped(installed):
    whole = installed.read_bytes()
    short = planner.strip_debug_info(whole)
    changed = {place for place, (a, b) in enumerate(zip(whole, short, strict=False)) if a != b}
    assert changed <= {*range(40, 48), *range(58, 64)}, "what says where the sections are"
    assert planner.strip_debug_info(short) == short


def test_another_kind_of_file_is_copied_as_it_is():
    assert (
        planner.strip_debug_info(b"\xcf\xfa\xed\xfe and the rest")
        == b"\xcf\xfa\xed\xfe and the rest"
    )
