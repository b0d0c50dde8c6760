import pytest
import torch
from PIL import Image

from dure.data import image_folder, random_flip_and_crop
from dure.data.randomness import at_epoch
from dure.errors import DataInvalid
from tests.cifar10_slice import unpack_slice


def save(path, colour, size=(6, 4), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def colours(tmp_path):
    save(tmp_path / "red" / "b.png", (255, 0, 0))
    save(tmp_path / "red" / "a.png", (200, 0, 0))
    save(tmp_path / "blue" / "deep" / "c.PNG", (0, 0, 255))
    (tmp_path / "blue" / "notes.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    return tmp_path


@pytest.fixture(scope="module")
def real_images(tmp_path_factory):
    return unpack_slice(tmp_path_factory.mktemp("cifar10"), num_per_class=3) / "train"


def test_image_folder_takes_classes_and_files_in_sorted_order(colours):
    data = image_folder(colours)
    images, labels = data.__getitems__(range(3))
    assert data.classes == ["blue", "red"]
    assert [path.name for path in data.paths] == ["c.PNG", "a.png", "b.png"]
    assert labels.tolist() == [0, 1, 1]
    assert images.dtype == torch.uint8
    assert images[:, :, 0, 0].tolist() == [[0, 0, 255], [200, 0, 0], [255, 0, 0]]
    assert images.shape == (3, 3, 4, 6)  # PIL says width first


def test_image_folder_fetched_singly_equals_the_batch_and_ends(colours):
    data = image_folder(colours)
    images, labels = data.__getitems__(range(3))
    singly = list(data)
    assert torch.equal(torch.stack([image for image, _ in singly]), images)
    assert [int(label) for _, label in singly] == labels.tolist()


def test_image_folder_in_memory_gives_the_same_batches(colours):
    data = image_folder(colours, transform=random_flip_and_crop(1))
    with at_epoch(1, 4):
        fetched, kept = data.__getitems__([2, 0]), data.in_memory().__getitems__([2, 0])
    assert all(torch.equal(*pair) for pair in zip(fetched, kept, strict=True))


def test_image_folder_converts_grey_and_palette_images_to_colour(tmp_path):
    save(tmp_path / "x" / "grey.png", 77, mode="L")
    save(tmp_path / "x" / "palette.png", 0, mode="P")
    assert image_folder(tmp_path).__getitems__([0])[0][0, :, 0, 0].tolist() == [77, 77, 77]
    assert image_folder(tmp_path)[1][0].shape == (3, 4, 6)


def test_image_folder_with_a_size_cuts_the_middle_square_out(tmp_path):
    save(tmp_path / "x" / "wide.png", (0, 0, 0), size=(40, 20))
    save(tmp_path / "x" / "tall.png", (9, 9, 9), size=(10, 30))
    images, _ = image_folder(tmp_path, size=8).__getitems__([0, 1])
    assert images.shape == (2, 3, 8, 8)


def test_image_folder_of_mixed_sizes_without_a_size_names_two_files(tmp_path):
    save(tmp_path / "x" / "a.png", (0, 0, 0), size=(40, 20))
    save(tmp_path / "x" / "b.png", (0, 0, 0), size=(10, 30))
    with pytest.raises(DataInvalid, match=r"b.png' is 10 x 30 pixels but .*a.png' is 40 x 20.*give size="):
        image_folder(tmp_path).__getitems__([0, 1])


@pytest.mark.parametrize("content", [b"", b"not an image at all", b"\xff\xd8\xff\xe0 cut"])
def test_image_folder_with_a_broken_image_names_the_file(colours, content):
    (colours / "red" / "broken.jpg").write_bytes(content)
    data = image_folder(colours)
    with pytest.raises(DataInvalid, match=r"broken.jpg' cannot be read as an image .*replace or remove it"):
        data.__getitems__(range(len(data)))


def test_image_folder_with_a_cut_off_jpeg_names_the_file(tmp_path):
    whole = tmp_path / "x" / "cut.jpg"
    save(whole, (1, 2, 3), size=(64, 64))
    whole.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(DataInvalid, match=r"cut.jpg' cannot be read as an image"):
        image_folder(tmp_path)[0]


def test_image_folder_that_does_not_exist_says_what_it_looks_like(tmp_path):
    with pytest.raises(DataInvalid, match=r"nowhere' is no folder: give one that holds a folder per class"):
        image_folder(tmp_path / "nowhere")


def test_image_folder_without_class_folders_is_refused(tmp_path):
    save(tmp_path / "loose.png", (0, 0, 0))
    with pytest.raises(DataInvalid, match="has no class folders"):
        image_folder(tmp_path)


def test_image_folder_without_images_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataInvalid, match="1 class folders but no image in them"):
        image_folder(tmp_path)


def test_image_folder_of_real_cifar10_decodes_to_its_size(real_images):
    data = image_folder(real_images)
    images, labels = data.in_memory().tensors
    assert data.classes == ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    assert images.shape == (30, 3, 32, 32)
    assert images.float().std() > 30  # pictures, not a plain colour
    assert labels.bincount().tolist() == [3] * 10
