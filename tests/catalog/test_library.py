"""Finding models by name and loading files."""

import subprocess
import sys
from pathlib import Path

import pytest

from slicewise.catalog import Catalog, load_entry, load_file, load_geometry
from slicewise.core.errors import GeometryError, SlicewiseError, UnknownNameError

EXAMPLE = Path(__file__).parents[2] / "examples" / "my-gpu.toml"

TINY = """
model = "{model}"
aliases = [{aliases}]
memory_slices = 2
compute_slices = 2
[[profile]]
name = "1g"
size = 1
compute = 1
starts = [0, 1]
"""


def tiny(folder: Path, model: str, *aliases: str) -> Path:
    path = folder / f"{model}.toml"
    path.write_text(TINY.format(model=model, aliases=", ".join(map(repr, aliases))))
    return path


@pytest.mark.parametrize(
    ("typed", "model"),
    [
        ("A100-80GB", "A100-80GB"),
        ("a100", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("nvidia_a100_80gb_pcie", "A100-80GB"),
        ("A30", "A30-24GB"),
        ("H100", "H100-80GB-SXM5"),
        ("h100-80gb", "H100-80GB-SXM5"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM5"),
        ("H100 PCIe", "H100-80GB-PCIe"),
        ("h100_nvl", "H100-94GB"),
        ("H200", "H200-141GB"),
        ("B200", "B200-180GB"),
        ("GB200", "GB200-186GB"),
        ("GH200", "GH200-96GB"),
        ("RTX-PRO-6000", "RTX-PRO-6000-Blackwell-96GB"),
        ("  rtx pro 6000 ", "RTX-PRO-6000-Blackwell-96GB"),
        ("thor", "Thor-iGPU"),
    ],
)
def test_names_are_found_as_typed(typed: str, model: str) -> None:
    assert Catalog.builtin().find(typed).model == model


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("A100-80", "did you mean A100-80GB"),
        ("rtx pro 600", "did you mean RTX PRO 6000 or"),
        ("gtx", "try `slicewise geometry`"),
        ("", "try `slicewise geometry`"),
    ],
)
def test_an_unknown_name_is_refused_with_the_near_ones(typed: str, advice: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        Catalog.builtin().find(typed)
    assert str(caught.value).startswith(f"unknown GPU model {typed!r}; {advice}")


def test_models_are_listed_in_natural_order() -> None:
    models = [entry.model for entry in Catalog.builtin().entries()]
    assert models[:3] == ["A30-24GB", "A100-40GB", "A100-80GB"]


def test_a_geometry_is_the_same_object_under_every_name() -> None:
    # Tables are cached by geometry, so a second copy would cost time and memory.
    assert load_geometry("A100") is load_geometry("a100-80gb")
    assert Catalog.builtin() is Catalog.builtin()


def test_the_example_file_loads() -> None:
    entry = load_file(EXAMPLE)
    geometry = load_geometry(str(EXAMPLE))
    assert entry.names == ("MY-GPU-48GB", "my gpu")
    assert [p.name for p in geometry.plain_profiles] == ["1g.8gb", "2g.16gb", "3g.24gb", "5g.48gb"]
    assert geometry.profile("1g.8gb").start_order == (4, 0, 1, 2, 3)
    assert geometry.profile("1g.8gb+video").uses == {"video": 1}
    assert load_geometry(EXAMPLE).model == geometry.model
    assert load_entry("DGX Station").geometry is None


def test_a_model_from_a_file_joins_the_catalog(tmp_path: Path) -> None:
    catalog = Catalog.builtin().with_file(EXAMPLE)
    assert catalog.find("my-gpu").model == "MY-GPU-48GB"
    assert len(catalog.entries()) == 29
    assert len(Catalog.builtin().entries()) == 28
    again = catalog.with_file(tiny(tmp_path, "MY-GPU-48GB"))
    assert len(again.entries()) == 29
    assert again.find("MY-GPU-48GB").memory_slices == 2


def test_a_model_from_a_file_replaces_a_builtin_of_that_name(tmp_path: Path) -> None:
    catalog = Catalog.builtin().with_file(tiny(tmp_path, "a100-80gb", "A100"))
    assert len(catalog.entries()) == 28
    assert catalog.find("A100-80GB").memory_slices == 2
    assert catalog.find("A100").memory_slices == 2
    with pytest.raises(UnknownNameError):
        catalog.find("A100-SXM4-80GB")  # An alias of the entry that was replaced.


def test_a_model_from_a_file_may_take_a_builtin_alias_as_its_name(tmp_path: Path) -> None:
    catalog = Catalog.builtin().with_file(tiny(tmp_path, "H200"))
    assert catalog.find("H200").memory_slices == 2
    assert catalog.find("H200-141GB").memory_slices == 8


@pytest.mark.parametrize("alias", ["A100", "a100-80gb", "my gpu"])
def test_an_alias_of_another_model_is_refused(tmp_path: Path, alias: str) -> None:
    catalog = Catalog.builtin().with_file(EXAMPLE)
    path = tiny(tmp_path, "OTHER", "fine", alias)
    with pytest.raises(GeometryError) as caught:
        catalog.with_file(path)
    assert str(caught.value).startswith(f"{path}: aliases[1]: {alias!r} already names ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model = ", "not TOML: Invalid value (at end of document)"),
        (b'model = "a"\nmodel = "b"\n', "not TOML: Cannot overwrite a value (at line 2"),
        (
            b"model = 'x'\nslices 8\n",
            "not TOML: Expected '=' after a key in a key/value pair (at line 2",
        ),
        (b"model = 'x'\n# caf\xe9\n", "line 2 is not UTF-8 text"),
        (b"x = " + b"[" * 100_000, "not TOML slicewise can read: nested too deeply"),
        (b"x = " + b"9" * 5000, "not TOML: Exceeds the limit"),
        (b"#" * 1_100_000, "larger than 1,048,576 bytes, so not a GPU model"),
        (b"", "model: is missing"),
        (b"\xef\xbb\xbfmodel = 'x'", "memory_slices: is missing"),
    ],
    ids=lambda value: value[:12].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(SlicewiseError) as caught:
        load_file(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_what_is_not_a_readable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlicewiseError, match=r"absent\.toml: cannot be read: No such file"):
        load_geometry("absent.toml")
    with pytest.raises(SlicewiseError, match=r": cannot be read: Is a directory"):
        load_geometry(f"{tmp_path}/")
    with pytest.raises(SlicewiseError, match=r"'a\\x00\.toml' is not a path"):
        load_geometry("a\0.toml")


def test_importing_reads_no_model() -> None:
    code = (
        "import slicewise.catalog.library as library\n"
        "assert library._builtin_entry.cache_info().currsize == 0\n"
        "library.load_geometry('A100-80GB')\n"
        "assert library._builtin_entry.cache_info().currsize == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
