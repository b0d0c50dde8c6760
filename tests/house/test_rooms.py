"""Rooms of the package: how many files a folder has, and whether the page and the tests follow."""

from tests.house.rooms import PAGE, ROOT, floors, page_with_drawing

MOST_FILES = 18


def test_folders_when_counted_then_none_has_more_files_than_one_finds_one_in() -> None:
    package = ROOT / "src/dure"
    folders = [package, *(path for path in package.rglob("*") if path.is_dir())]
    counts = {str(folder.relative_to(package)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_page_when_the_floors_change_then_its_drawing_follows() -> None:
    assert set(floors()) >= {"dure", "dure.launch", "dure.training", "dure.strategies", "dure.comm"}
    assert PAGE.read_text(encoding="utf-8") == page_with_drawing(), "run python -m tests.house.rooms"


WHOLE_RUNS = {
    "sick",
    "benchmarks",
    "conformance",
    "examples",
    "faults",
    "house",
    "outside",
    "samples",
    "simulated_cuda",
}
"""Folders of tests of whole runs, or of what is no module of the package."""


def test_tests_when_a_folder_is_named_then_the_package_has_one_of_that_name() -> None:
    tests, package = ROOT / "tests", ROOT / "src/dure"
    folders = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")}
    mirrored = {folder for folder in folders if folder.parts and folder.parts[0] not in WHOLE_RUNS}
    assert {str(folder) for folder in mirrored if not (package / folder).is_dir()} == set()
