"""Names that a file cannot bind are found without an import; what is not sure is left to the import."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.user_code.bound_names import init_parameters, missing


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class Other: ...\ndef make(): ...\n_x = 1", ["Other", "make"]),
        ("from nets import Other\nNett = Other\nsize = 3\ndef make(): ...", ["Nett", "make"]),
        ("if True:\n    from torch.nn import Linear as Net", None),
        ("from torch.nn import *", None),
        ("for Net in (): ...", None),
        ("(a, *Net) = 1, 2", None),
        ("globals()['N' + 'et'] = 1", None),
        ("import sys\nsys.modules[__name__] = object()", None),
        ("def __getattr__(name): ...", None),
        ("class Net(:", None),
    ],
)
def test_only_what_no_statement_binds_is_missing(text: str, found: list[str] | None, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(text)
    assert missing(file, "Net") == found


def test_a_package_has_its_modules(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    (tmp_path / "net.py").touch()
    assert missing(tmp_path / "__init__.py", "net") is None
    assert missing(tmp_path / "__init__.py", "Net") == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class Net:\n    def __init__(self, a, b=2, *c, d, e=5): ...", ["a", "b", "d", "e"]),
        ("class Net:\n    def __init__(self, a, **others): ...", None),
        ("class Net(Base): ...", None),
        ("@dataclass\nclass Net:\n    def __init__(self, a): ...", None),
        ("class Net(Base, metaclass=Kind):\n    def __init__(self, a): ...", None),
        ("class Net:\n    @wraps\n    def __init__(self, a): ...", None),
        ("class Net:\n    def __init__(self, a): ...\nNet = partial(Net)", None),
        ("def Net(a): ...", None),
        ("class Net(:", None),
    ],
)
def test_arguments_of_a_class_where_its_source_tells_them(text: str, found: list[str] | None, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(text)
    assert init_parameters(file, "Net") == found
