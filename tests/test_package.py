"""The house as a whole: what an import costs, where names live, and which room may know of which."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf

PACKAGE = Path(rlhf.__file__).parent
# left is lower: a room imports only from rooms to its left
ROOMS = (
    "errors",
    "parallel",
    "models",
    "adapters",
    "optim",
    "data",
    "rollout",
    "scoring",
    "learner",
    "reward",
    "ppo",
    "sft",
    "monitor",
    "loop",
)
HEAVY = (
    "torch", "transformers", "tokenizers", "accelerate", "datasets", "numpy", "pyarrow", "pandas", "peft", "sglang", "matplotlib", "trl",
    "tqdm", "wandb", "tensorboard",
)  # fmt: skip
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere: at its top, in functions and for type checking alike."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the full name"
            found |= {f"rlhf.{alias.name}" for alias in node.names} if node.module == "rlhf" else {str(node.module)}
    return found


def _room(module: str) -> str:
    return module.split(".")[1]


# ---------------------------------------------------------------- what an import costs


@pytest.fixture(scope="module")
def fresh_imports() -> list[dict[str, object]]:
    """`import rlhf` in three new interpreters: its seconds, and the modules it brought."""
    code = (
        "import json, sys, time; start = time.perf_counter(); import rlhf; "
        "print(json.dumps({'seconds': time.perf_counter() - start, 'modules': sorted(sys.modules)}))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60) for _ in range(3)]
    return [json.loads(run.stdout) for run in runs]


def test_importing_takes_less_than_three_tenths_of_a_second(fresh_imports: list[dict[str, object]]) -> None:
    assert min(run["seconds"] for run in fresh_imports) < 0.3  # type: ignore[type-var]


@pytest.mark.parametrize("heavy", HEAVY)
def test_importing_does_not_bring(heavy: str, fresh_imports: list[dict[str, object]]) -> None:
    assert heavy not in fresh_imports[0]["modules"]  # type: ignore[operator]


def test_importing_does_bring_the_package_itself(fresh_imports: list[dict[str, object]]) -> None:
    assert "rlhf" in fresh_imports[0]["modules"]  # type: ignore[operator]  # so that the tests above look at something


# ---------------------------------------------------------------- public names


@pytest.mark.parametrize("name", rlhf.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(rlhf, name) is not None


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == rlhf._HOME_OF


def test_public_names_are_listed_by_dir_and_unknown_ones_raise() -> None:
    assert set(rlhf.__all__) <= set(dir(rlhf))
    with pytest.raises(AttributeError, match="no attribute 'Grpo'"):
        rlhf.Grpo  # noqa: B018


def test_rooms_are_reached_as_attributes_and_others_are_not() -> None:
    code = "import rlhf; print(rlhf.errors.ShapeError.__name__); rlhf.dpo"  # errors: the one room that costs nothing to import
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert run.stdout.split() == ["ShapeError"]
    assert "module 'rlhf' has no attribute 'dpo'" in run.stderr


def test_no_public_function_bears_the_name_of_a_module() -> None:
    modules = {info.name.rsplit(".", 1)[-1] for info in pkgutil.walk_packages([str(PACKAGE)], "rlhf.")}
    public = {name: getattr(rlhf, name) for name in rlhf.__all__}
    for room in ROOMS:
        module = importlib.import_module(f"rlhf.{room}")
        public |= {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    clashes = {name for name, value in public.items() if inspect.isfunction(value)} & modules
    assert not clashes


def test_the_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert rlhf.__version__ == version("rlhf")


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


# ---------------------------------------------------------------- who may know of whom


def test_every_module_belongs_to_a_room() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert rooms == {*ROOMS, "version"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_from_rooms_to_its_left(path: Path) -> None:
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if here == "version":
        assert not _imports(path) - {"__future__"}
        return
    left = ROOMS[: ROOMS.index(here) + 1]
    ours = {module for module in _imports(path) if module == "rlhf" or module.startswith("rlhf.")}
    assert "rlhf" not in ours, f"{path} imports the whole package; import from the room"
    wrong = {module for module in ours if _room(module) not in (*left, "version")}
    assert not wrong, f"{here} may import from {', '.join(left)}"


def test_the_import_test_sees_imports_in_functions_and_for_type_checking(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("if TYPE_CHECKING:\n    from rlhf.loop import OnPolicyLoop\ndef f():\n    import rlhf.sft\n    from rlhf import ppo\n")
    assert _imports(file) == {"rlhf.loop", "rlhf.sft", "rlhf.ppo"}


@pytest.mark.parametrize("name", ["advantages", "losses", "kl"])
def test_the_mathematics_imports_torch_and_nothing_of_ours_but_errors(name: str) -> None:
    foreign = {module for module in _imports(PACKAGE / "ppo" / f"{name}.py") if module.split(".")[0] not in sys.stdlib_module_names}
    assert "torch" in foreign
    assert foreign <= {"torch", "torch.nn.functional", "rlhf.errors"}


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("peft", {"adapters.py"}),
        # the decode loop plugs into transformers' cache and attention; loading stands in models alone
        ("transformers", {"models.py", "rollout/cache.py", "rollout/attention.py"}),
    ],
)
def test_few_files_know_of_the_packages_that_models_come_from(package: str, rooms: set[str]) -> None:
    users = {str(path.relative_to(PACKAGE)) for path in FILES if package in {module.split(".")[0] for module in _imports(path)}}
    assert users
    assert users <= rooms
