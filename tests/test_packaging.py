"""The package list in pyproject.toml is hand-kept beside the folders: a wheel drops a forgotten one without a word."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAPPED = ("compiler", "passes", "plugins", "recipes", "runtime")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def folders() -> set[str]:
    """Folders below the mapped ones that hold files (not only caches or other folders)."""
    every = [folder for name in MAPPED for folder in (ROOT / name, *(ROOT / name).rglob("*/"))]
    return {f.relative_to(ROOT).as_posix() for f in every if "__pycache__" not in f.parts and any(f.glob("*.*"))}


def test_every_folder_is_a_package():
    assert len(folders()) > 15
    assert set(SETUPTOOLS["package-dir"].values()) == folders()


def test_packages_are_named_after_their_folders():
    assert SETUPTOOLS["package-dir"] == {"dsc." + path.replace("/", "."): path for path in sorted(folders())}
    assert sorted(SETUPTOOLS["packages"]) == sorted(SETUPTOOLS["package-dir"])


def test_every_folder_has_an_init():
    assert [folder for folder in folders() if not (ROOT / folder / "__init__.py").is_file()] == []


def test_plugins_are_found_by_name_only():
    """Importing a package must not import its ops."""
    inits = [ROOT / folder / "__init__.py" for folder in folders() if folder.startswith(("plugins", "passes"))]
    assert [init for init in inits if init.read_text().strip()] == []


def test_every_other_file_is_package_data():
    """Recipes, kernels, shapes of known models: what no pattern of package-data takes is missing from a wheel."""
    patterns = SETUPTOOLS["package-data"]
    data = [path for name in folders() for path in (ROOT / name).iterdir() if path.is_file() and path.suffix != ".py"]
    assert len(data) > 10
    for path in data:
        package = "dsc." + path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        taken = [*patterns.get(package, ()), *patterns["*"]]
        assert any(path.match(pattern) for pattern in taken), path
