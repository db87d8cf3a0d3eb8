"""The official layouts of five data sets, built small: which files, in which order, with which labels and names."""

import json
import tarfile
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.formats import recognise
from tico_ssl.data.formats.folder import open_folder
from tico_ssl.data.formats.voc2007 import VOC_CLASSES
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_source
from tico_ssl.runtime.errors import UserError

TENCH, GOLDFISH, CRANE, CRANE_MACHINE = "n01440764", "n01443537", "n02012849", "n03126707"
WNIDS = (TENCH, GOLDFISH, CRANE, CRANE_MACHINE)
WORDS = ("tench, Tinca tinca", "goldfish, Carassius auratus", "crane", "crane")


def write(path, contents: str | None = None):
    """A text, or a small image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if contents is None:
        Image.new("RGB", (9, 8), (10, 20, 30)).save(path, "JPEG")
    else:
        path.write_text(contents)
    return path


def source(path, split: str = "train") -> Source | None:
    return open_source(DataConfig(source=str(path)), split)


def names(found: Source) -> list[str]:
    return [found.names(i) for i in range(len(found))]


def class_of(found: Source) -> dict[str, str]:
    return {found.names(i): found.classes[found.labels[i]] for i in range(len(found))}


def error_of(path, *mentions: str, split: str = "train") -> None:
    with pytest.raises(UserError) as caught:
        source(path, split)
    line = str(caught.value)
    assert "\n" not in line
    for text in mentions:
        assert text in line, line


# ---------------------------------------------------------------------------------------------------- ImageNet-1k


def imagenet(home, flat: bool = False):
    """Two training images a class; four of validation, not in the order of the classes; a test/ without labels."""
    for wnid in WNIDS:
        for number in (17, 4):
            write(home / "train" / wnid / f"{wnid}_{number}.JPEG")
    for number, wnid in enumerate((CRANE_MACHINE, TENCH, CRANE, GOLDFISH), 1):
        file = f"ILSVRC2012_val_{number:08}.JPEG"
        write(home / "val" / file if flat else home / "val" / wnid / file)
        write(home / "test" / f"ILSVRC2012_test_{number:08}.JPEG")
    return home


def validation_labels() -> dict[str, int]:
    """Of the four images above, by file name."""
    return {f"ILSVRC2012_val_{number:08}.JPEG": label for number, label in enumerate((3, 0, 2, 1), 1)}


def kaggle_texts(folder) -> None:
    rows = "\n".join(
        f"ILSVRC2012_val_{number:08},{WNIDS[label]} 85 1 499 272 {WNIDS[label]} 1 2 3 4 "
        for number, label in [(3, 2), (1, 3), (4, 1), (2, 0)]  # Kaggle's list is not in order
    )
    write(folder / "LOC_val_solution.csv", f"ImageId,PredictionString\n{rows}\n")
    write(folder / "LOC_synset_mapping.txt", "".join(f"{wnid} {words}\n" for wnid, words in zip(WNIDS, WORDS)))


def development_kit(folder) -> None:
    """Its numbers are not in the order of the wnids, and groups of classes follow the classes."""
    numbers = {TENCH: 3, GOLDFISH: 1, CRANE: 4, CRANE_MACHINE: 2}
    kind = [(name, object) for name in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children")]
    rows = [(float(numbers[wnid]), wnid, words, "a gloss", 0.0, []) for wnid, words in zip(WNIDS, WORDS)]
    rows = [*sorted(rows, key=lambda row: row[0]), (5.0, "n00001740", "entity", "all", 2.0, [1.0, 2.0])]
    data = folder / "ILSVRC2012_devkit_t12" / "data"
    order = [numbers[WNIDS[label]] for label in validation_labels().values()]
    write(data / "ILSVRC2012_validation_ground_truth.txt", "".join(f"{number}\n" for number in order))
    savemat(data / "meta.mat", {"synsets": np.array(rows, dtype=kind).reshape(-1, 1)})


def test_class_folders_of_imagenet_are_as_in_any_folder(tmp_path):
    home = imagenet(tmp_path / "imagenet")
    for file in (home / "test").iterdir():
        file.unlink()
    (home / "test").rmdir()
    for split, count in (("train", 8), ("test", 4)):
        found, plain = source(home, split), open_folder(home, split)
        assert len(found) == count
        assert found.name == plain.name
        assert names(found) == names(plain)
        assert [found.files(i) for i in range(count)] == [plain.files(i) for i in range(count)]
        assert torch.equal(found.labels, plain.labels)
        assert found.classes == plain.classes == WNIDS
    assert found.fetch(0).shape == (3, 8, 9)


@pytest.mark.parametrize("flat", [False, True])
def test_the_unlabelled_test_folder_is_never_the_test_split(tmp_path, flat):
    test = source(imagenet(tmp_path, flat), "test")
    assert len(test) == 4
    assert all("_val_" in name for name in names(test))
    assert (test.labels is None) == flat  # nothing says what the flat ones are
    for file in (tmp_path / "val").rglob("*"):
        file.unlink() if file.is_file() else None
    for folder in [*(tmp_path / "val").iterdir(), tmp_path / "val"]:
        folder.rmdir()
    assert source(tmp_path, "test") is None


def test_test_folders_with_classes_are_the_test_split_without_validation(tmp_path):
    for place in ("train", "test"):
        for wnid in WNIDS[:2]:
            write(tmp_path / place / wnid / "1.JPEG")
    assert source(tmp_path, "test").labels.tolist() == [0, 1]


@pytest.mark.parametrize("given", ["", "ILSVRC", "ILSVRC/Data", "ILSVRC/Data/CLS-LOC"])
def test_kaggles_archive_from_any_of_its_folders(tmp_path, given):
    imagenet(tmp_path / "ILSVRC" / "Data" / "CLS-LOC", flat=True)
    write(tmp_path / "ILSVRC" / "ImageSets" / "CLS-LOC" / "val.txt", "ILSVRC2012_val_00000001 1\n")
    kaggle_texts(tmp_path)
    train, test = source(tmp_path / given), source(tmp_path / given, "test")
    assert train.classes == test.classes
    assert train.classes == (f"{TENCH} tench", f"{GOLDFISH} goldfish", f"{CRANE} crane", f"{CRANE_MACHINE} crane")
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert names(train)[:3] == [f"{TENCH}/{TENCH}_17.JPEG", f"{TENCH}/{TENCH}_4.JPEG", f"{GOLDFISH}/{GOLDFISH}_17.JPEG"]
    assert dict(zip(names(test), test.labels.tolist())) == validation_labels()
    assert test.labels.dtype == torch.int64
    assert test.fetch(3).shape == (3, 8, 9)


def test_a_relative_path_finds_the_lists_above_it(tmp_path, monkeypatch):
    imagenet(tmp_path / "ILSVRC" / "Data" / "CLS-LOC", flat=True)
    kaggle_texts(tmp_path)
    monkeypatch.chdir(tmp_path / "ILSVRC" / "Data" / "CLS-LOC")
    assert source(".", "test").labels.tolist() == [3, 0, 2, 1]


@pytest.mark.parametrize("beside", [False, True])
def test_the_development_kit_numbers_classes_otherwise(tmp_path, beside):
    home = imagenet(tmp_path / "imagenet", flat=True)
    development_kit(tmp_path if beside else home)
    test = source(home, "test")
    assert dict(zip(names(test), test.labels.tolist())) == validation_labels()
    assert test.classes[0] == f"{TENCH} tench"
    (home / "val" / "ILSVRC2012_val_00000002.JPEG").unlink()  # the others keep their lines
    assert source(home, "test").labels.tolist() == [3, 2, 1]


def test_names_from_the_index_of_classes(tmp_path):
    index = {str(i): [wnid, words.split(",")[0].replace(" ", "_")] for i, (wnid, words) in enumerate(zip(WNIDS, WORDS))}
    index["2"] = [CRANE, "great_crane"]
    del index["1"]
    write(imagenet(tmp_path) / "imagenet_class_index.json", json.dumps(index))
    assert source(tmp_path).classes == (f"{TENCH} tench", GOLDFISH, f"{CRANE} great crane", f"{CRANE_MACHINE} crane")


def test_a_class_that_validation_lacks_does_not_shift_the_others(tmp_path):
    imagenet(tmp_path)
    (tmp_path / "val" / GOLDFISH / "ILSVRC2012_val_00000004.JPEG").unlink()
    (tmp_path / "val" / GOLDFISH).rmdir()
    assert source(tmp_path, "test").labels.tolist() == [0, 2, 3]
    assert source(tmp_path, "test").classes == WNIDS


def test_archives_beside_the_folders_do_not_matter(tmp_path):
    imagenet(tmp_path)
    with tarfile.open(tmp_path / "ILSVRC2012_img_train.tar", "w"):
        pass
    assert len(source(tmp_path)) == 8


def test_other_class_folders_are_no_imagenet(tmp_path):
    imagenet(tmp_path)
    write(tmp_path / "train" / "cats" / "1.jpg")
    assert recognise(str(tmp_path))[0] == "folder"


def test_malformed_lists_of_imagenet_are_one_line(tmp_path):
    home = imagenet(tmp_path, flat=True)
    table = write(
        home / "LOC_val_solution.csv", f"ImageId,PredictionString\nILSVRC2012_val_00000001,{TENCH} 1\nhello\n"
    )
    error_of(home, str(table), "line 3", "hello", split="test")
    write(table, f"ImageId,PredictionString\nILSVRC2012_val_00000001,{TENCH} 1\n")
    error_of(home, "ILSVRC2012_val_00000002.JPEG", "labels", split="test")
    write(table, "".join(f"ILSVRC2012_val_{number:08},n99999999 1\n" for number in range(1, 5)))
    error_of(home, "n99999999", "no training folder", split="test")
    words = write(home / "LOC_synset_mapping.txt", f"{TENCH} tench\ntwo words\n")
    error_of(home, str(words), "line 2")
    words.unlink()
    for text, mention in (("{", "line 1"), ("[]", "n01440764"), ('{"0": "tench"}', "n01440764")):
        error_of(home, str(write(home / "imagenet_class_index.json", text)), mention)


def test_a_damaged_development_kit_is_one_line(tmp_path):
    home = imagenet(tmp_path, flat=True)
    development_kit(home)
    data = home / "ILSVRC2012_devkit_t12" / "data"
    truth = write(data / "ILSVRC2012_validation_ground_truth.txt", "1\n2\n9\n1\n")
    error_of(home, str(truth), "line 3", "class 9", split="test")
    write(truth, "1\ntwo\n")
    error_of(home, str(truth), "line 2", "two", split="test")
    whole = (data / "meta.mat").read_bytes()
    for contents in (whole[: len(whole) // 2], b"<html>404</html>", b""):
        (data / "meta.mat").write_bytes(contents)
        error_of(home, str(data / "meta.mat"), split="test")
    (data / "meta.mat").unlink()
    error_of(home, str(data / "meta.mat"), split="test")


# ---------------------------------------------------------------------------------------------------- Tiny-ImageNet


def tiny_imagenet(home):
    """Two training images a class; four of validation, not in the order of the classes; a test/ without labels."""
    for wnid in WNIDS:
        for number in range(2):
            write(home / "train" / wnid / "images" / f"{wnid}_{number}.JPEG")
        write(home / "train" / wnid / f"{wnid}_boxes.txt", f"{wnid}_0.JPEG\t0\t10\t63\t58\n")
    rows = []
    for number, wnid in enumerate((CRANE_MACHINE, TENCH, CRANE, GOLDFISH)):
        write(home / "val" / "images" / f"val_{number}.JPEG")
        write(home / "test" / "images" / f"test_{number}.JPEG")
        rows.append(f"val_{number}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    write(home / "val" / "val_annotations.txt", "".join(reversed(rows)))
    words = [("n00001740", "entity"), *zip(WNIDS, WORDS)]
    write(home / "words.txt", "".join(f"{wnid}\t{names}\n" for wnid, names in words))
    write(home / "wnids.txt", "".join(f"{wnid}\n" for wnid in reversed(WNIDS)))
    return home


def test_tiny_imagenet(tmp_path):
    home = tiny_imagenet(tmp_path / "tiny-imagenet-200")
    train, test = source(home), source(home, "test")
    assert train.classes == test.classes
    assert train.classes == (f"{TENCH} tench", f"{GOLDFISH} goldfish", f"{CRANE} crane", f"{CRANE_MACHINE} crane")
    assert names(train)[:2] == [f"{TENCH}/images/{TENCH}_0.JPEG", f"{TENCH}/images/{TENCH}_1.JPEG"]
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (train.name, test.name) == ("tiny-imagenet-200/train", "tiny-imagenet-200/val")
    assert names(test) == [f"images/val_{number}.JPEG" for number in range(4)]
    assert test.labels.tolist() == [3, 0, 2, 1]
    assert test.fetch(0).shape == (3, 8, 9)


@pytest.mark.parametrize("inside", ["", "images"])
def test_tiny_imagenet_with_its_validation_sorted_into_classes(tmp_path, inside):
    """As many scripts leave it: the list stays, images/ perhaps too."""
    home = tiny_imagenet(tmp_path)
    for number, wnid in enumerate((CRANE_MACHINE, TENCH, CRANE, GOLDFISH)):
        place = home / "val" / wnid / inside / f"val_{number}.JPEG"
        place.parent.mkdir(parents=True)
        (home / "val" / "images" / place.name).rename(place)
    assert source(home, "test").labels.tolist() == [0, 1, 2, 3]


def test_malformed_lists_of_tiny_imagenet_are_one_line(tmp_path):
    home = tiny_imagenet(tmp_path)
    listing = write(home / "val" / "val_annotations.txt", f"val_0.JPEG\t{TENCH}\t0\t0\t1\t1\nval_1.JPEG tench\n")
    error_of(home, str(listing), "line 2", split="test")
    write(listing, f"val_0.JPEG\t{TENCH}\n")
    error_of(home, "val_1.JPEG", "not in the list", split="test")
    listing.unlink()
    assert source(home, "test").labels is None
    error_of(home, str(write(home / "words.txt", "nonsense\n")), "line 1")


# ---------------------------------------------------------------------------------------------------- Places-205

PLACES = {"a/abbey": 0, "a/apartment_building/outdoor": 1, "y/yard": 2}
OFFICIAL_IMAGES = "data/vision/torralba/deeplearning/images256"


def places(root, images: str = OFFICIAL_IMAGES, separator: str = " "):
    """Two training images and one of validation a class, listed backwards."""
    lines: dict[str, list[str]] = {"train": [], "val": []}
    for folder, label in reversed(PLACES.items()):
        for split, number in (("train", 1), ("train", 2), ("val", 3)):
            file = f"{folder}/gsun_{number}{label}.jpg"
            write(root / images / file)
            lines[split].append(f"{file}{separator}{label}\n")
    for split, text in lines.items():
        write(root / "trainvalsplit_places205" / f"{split}_places205.csv", "".join(text))
    return root


@pytest.mark.parametrize("separator", [" ", ",", ", "])
@pytest.mark.parametrize("images", [OFFICIAL_IMAGES, "images256", "."])
def test_places(tmp_path, images, separator):
    places(tmp_path, images, separator)
    train, test = source(tmp_path), source(tmp_path, "test")
    assert (len(train), len(test)) == (6, 3)
    assert names(train)[:3] == ["y/yard/gsun_12.jpg", "y/yard/gsun_22.jpg", "a/apartment_building/outdoor/gsun_11.jpg"]
    assert train.labels.tolist() == [2, 2, 1, 1, 0, 0]
    assert test.labels.tolist() == [2, 1, 0]
    assert train.classes == test.classes == tuple(PLACES)
    assert all(file.rpartition("/")[0] == name for file, name in class_of(train).items())
    assert train.fetch(0).shape == (3, 8, 9)
    assert train.files(0).is_file()


@pytest.mark.parametrize("name", ["placesCategory_places205.csv", "categoryIndex_places205.csv"])
@pytest.mark.parametrize("folder", [".", "trainvalsplit_places205"])
def test_categories_of_places_by_their_table(tmp_path, folder, name):
    places(tmp_path)
    write(tmp_path / folder / name, "/y/yard 2\n/a/abbey 0\n/a/apartment_building/outdoor 1\n/z/zoo 3\n")
    assert source(tmp_path).classes == source(tmp_path, "test").classes == (*PLACES, "z/zoo")


def test_places_without_validation_has_no_test_split(tmp_path):
    (places(tmp_path) / "trainvalsplit_places205" / "val_places205.csv").unlink()
    assert len(source(tmp_path)) == 6
    assert source(tmp_path, "test") is None


def test_malformed_lists_of_places_are_one_line(tmp_path):
    places(tmp_path)
    training = tmp_path / "trainvalsplit_places205" / "train_places205.csv"
    validation = tmp_path / "trainvalsplit_places205" / "val_places205.csv"
    write(validation, "a/abbey/gsun_30.jpg 0\n\na/abbey/gsun_31.jpg\n")
    error_of(tmp_path, str(validation), "line 3", "gsun_31.jpg", split="test")
    write(validation, "a/abbey/gsun_30.jpg 7\n")
    error_of(tmp_path, str(validation), "gsun_30.jpg", "class 7", split="test")
    write(validation, "b/beach/gsun_30.jpg 0\n")
    error_of(tmp_path, OFFICIAL_IMAGES + "/b/beach", "val_places205.csv", split="test")
    write(training, "a/abbey/gsun_10.jpg 0\ny/yard/gsun_12.jpg 2\n")
    error_of(tmp_path, str(training), "no 1")
    write(training, "a/abbey/gsun_10.jpg -1\n")
    error_of(tmp_path, str(training), "line 1")
    write(training, "")
    error_of(tmp_path, "no images found")


def test_many_files_open_without_a_look_at_them(tmp_path):
    """Two hundred thousand listed, none there: what stays in memory are two arrays and the labels."""
    count, classes = 200_000, 100
    for label in range(classes):
        (tmp_path / "images256" / "c" / f"class_{label:03}").mkdir(parents=True)
    lines = (f"c/class_{i % classes:03}/gsun_{i:032}.jpg {i % classes}\n" for i in range(count))
    write(tmp_path / "trainvalsplit_places205" / "train_places205.csv", "".join(lines))
    tracemalloc.start()
    found = source(tmp_path)
    kept, _ = tracemalloc.get_traced_memory()  # without tensors: 8 bytes a label
    tracemalloc.stop()
    assert len(found) == count
    assert found.names(123_456) == f"c/class_056/gsun_{123_456:032}.jpg"
    assert int(found.labels[123_456]) == 56
    assert kept < 80 * count
    with pytest.raises(UserError, match=r"class_000/gsun_0+\.jpg"):
        found.fetch(0)


# ---------------------------------------------------------------------------------------------------- iNaturalist 2018

SPECIES = {0: "Sarcophilus harrisii", 3: "Bufo bufo", 7: "Abies alba"}  # not in the order of names


def inaturalist(root):
    """Two training images and one of validation a species, in the order of image numbers, which is nobody else's."""
    categories = [{"id": number, "name": name, "supercategory": "Life"} for number, name in reversed(SPECIES.items())]
    for split, picks in (("train", (0, 1)), ("val", (2,))):
        images, annotations = [], []
        for place, category in enumerate([7, 0, 3]):
            for pick in picks:
                image = 100 * pick + place
                file = f"train_val2018/Life/{category}/{image:032x}.jpg"
                write(root / file)
                images.append({"id": image, "file_name": file, "width": 9, "height": 8, "license": 1})
                annotations.insert(0, {"id": image, "image_id": image, "category_id": category})
        tables = {"info": {}, "licenses": [], "images": images, "annotations": annotations, "categories": categories}
        write(root / f"{split}2018.json", json.dumps(tables))
    return root


def test_inaturalist(tmp_path):
    inaturalist(tmp_path)
    train, test = source(tmp_path), source(tmp_path, "test")
    assert (len(train), len(test)) == (6, 3)
    assert names(train)[:2] == [f"train_val2018/Life/7/{0:032x}.jpg", f"train_val2018/Life/7/{100:032x}.jpg"]
    assert train.labels.tolist() == [2, 2, 0, 0, 1, 1]
    assert test.labels.tolist() == [2, 0, 1]
    assert train.classes == test.classes == tuple(SPECIES.values())
    assert test.fetch(2).shape == (3, 8, 9)


def test_names_of_species_came_later(tmp_path):
    inaturalist(tmp_path)
    later = [{"id": number, "name": f"{name} (later)"} for number, name in SPECIES.items()]
    write(tmp_path / "categories.json", json.dumps(later))
    assert source(tmp_path, "test").classes[0] == "Sarcophilus harrisii (later)"


def test_the_training_list_numbers_the_species(tmp_path):
    inaturalist(tmp_path)
    data = json.loads((tmp_path / "val2018.json").read_text())
    del data["categories"]
    write(tmp_path / "val2018.json", json.dumps(data))
    assert source(tmp_path, "test").labels.tolist() == [2, 0, 1]
    (tmp_path / "val2018.json").unlink()
    assert source(tmp_path, "test") is None


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (lambda data: data["annotations"].pop(), ["image 0", "no annotation"]),
        (lambda data: data["annotations"][5].update(category_id=5), ["image 0", "category 5"]),
        (lambda data: data["images"][4].pop("file_name"), ["images[4]", "'file_name'"]),
        (lambda data: data["images"].append("x"), ["images[6]", "'id'"]),
        (lambda data: data["annotations"][1].update(image_id=[1]), ["annotations[1]", "'image_id'"]),
        (lambda data: data.pop("annotations"), ["'annotations'"]),
        (lambda data: data.update(categories={}), ["'categories'"]),
        (lambda data: data["images"][0].update(file_name="train_val2018/Life/9/x.jpg"), ["Life/9", "no such folder"]),
    ],
)
def test_malformed_lists_of_inaturalist_are_one_line(tmp_path, change, mentions):
    data = json.loads((inaturalist(tmp_path) / "train2018.json").read_text())
    change(data)
    write(tmp_path / "train2018.json", json.dumps(data))
    error_of(tmp_path, "train2018.json", *mentions)


def test_json_that_is_none_is_one_line(tmp_path):
    listing = inaturalist(tmp_path) / "train2018.json"
    for contents, mention in ((b'{"images": [\n{"id": 1,\n', "line 3"), (b"\xff\xff", "not JSON"), (b"3", "list")):
        listing.write_bytes(contents)
        error_of(tmp_path, str(listing), mention)


# ---------------------------------------------------------------------------------------------------- VOC2007

VOC_IMAGES = {"trainval": ("000005", "000012", "000007"), "test": ("000001", "000002")}
VOC_VALUES = {("person", "000005"): 1, ("cat", "000005"): 0, ("cat", "000012"): 1, ("tvmonitor", "000002"): 1}


def voc(home, parts=("trainval", "test")):
    """As unpacked, with what else lies in those folders."""
    for part in parts:
        for name in VOC_CLASSES:
            rows = [f"{image} {VOC_VALUES.get((name, image), -1):2d}\n" for image in VOC_IMAGES[part]]
            write(home / "ImageSets" / "Main" / f"{name}_{part}.txt", "".join(rows))
        write(home / "ImageSets" / "Main" / f"{part}.txt", "".join(f"{image}\n" for image in VOC_IMAGES[part]))
        for image in VOC_IMAGES[part]:
            write(home / "JPEGImages" / f"{image}.jpg")
            write(home / "SegmentationClass" / f"{image}.png")
    return home


@pytest.mark.parametrize("given", [".", "VOCdevkit", "VOCdevkit/VOC2007"])
def test_voc(tmp_path, given):
    voc(tmp_path / "VOCdevkit" / "VOC2007")
    voc(tmp_path / "VOCdevkit" / "VOC2012", ["trainval"])
    with tarfile.open(tmp_path / "VOCtrainval_06-Nov-2007.tar", "w"):
        pass
    train, test = source(tmp_path / given), source(tmp_path / given, "test")
    assert (train.name, test.name) == ("VOC2007/trainval", "VOC2007/test")
    assert names(train) == ["000005.jpg", "000012.jpg", "000007.jpg"]
    assert names(test) == ["000001.jpg", "000002.jpg"]
    assert train.classes == test.classes == tuple(sorted(VOC_CLASSES))
    assert len(train.classes) == 20
    assert train.labels.shape == (3, 20)
    assert train.labels.dtype == torch.int64
    for found in (train, test):
        for i, file in enumerate(names(found)):
            expected = [VOC_VALUES.get((name, file.removesuffix(".jpg")), -1) for name in found.classes]
            assert found.labels[i].tolist() == expected
    assert train.fetch(0).shape == (3, 8, 9)
    assert train.files(0) == tmp_path / "VOCdevkit" / "VOC2007" / "JPEGImages" / "000005.jpg"
    assert train.subset(torch.tensor([1])).labels.shape == (1, 20)


def test_voc_without_test_lists_has_no_test_split(tmp_path):
    voc(tmp_path / "VOC2007", ["trainval"])
    assert len(source(tmp_path)) == 3
    assert source(tmp_path, "test") is None


def test_other_data_in_the_folders_of_voc_are_a_plain_folder(tmp_path):
    write(tmp_path / "ImageSets" / "Main" / "trainval.txt", "1\n")
    write(tmp_path / "JPEGImages" / "1.jpg")
    assert recognise(str(tmp_path))[0] == "folder"
    assert len(source(tmp_path)) == 1


def test_folders_of_annotations_are_no_classes(tmp_path):
    """Blood cells in VOC's layout: 364 images, and neither three classes nor one."""
    for number in range(3):
        write(tmp_path / "cells" / "JPEGImages" / f"{number}.jpg")
        write(tmp_path / "cells" / "Annotations" / f"{number}.xml", "<annotation/>")
        write(tmp_path / "cells" / "SegmentationClass" / f"{number}.png")
    write(tmp_path / "cells" / "ImageSets" / "Main" / "trainval.txt", "1\n")
    for place in (tmp_path / "cells", tmp_path):  # as VOCdevkit/VOC2012
        found = source(place)
        assert (names(found), found.labels, found.classes) == (["0.jpg", "1.jpg", "2.jpg"], None, ())
        assert source(place, "test") is None
    write(tmp_path / "another.jpg")
    assert len(source(tmp_path)) == 7  # a folder of one's own making, of which nothing is known


def test_folders_without_images_are_no_classes(tmp_path):
    for name in ("a", "c"):
        write(tmp_path / "train" / name / "deeper" / "1.png")
        write(tmp_path / "test" / name / "1.png")
    write(tmp_path / "train" / "b" / "notes.txt", "none here")
    (tmp_path / "train" / "empty").mkdir()
    for split in ("train", "test"):
        found = source(tmp_path, split)
        assert (found.classes, found.labels.tolist()) == (("a", "c"), [0, 1])
    write(tmp_path / "alone" / "a" / "1.png")
    (tmp_path / "alone" / "b").mkdir()
    assert source(tmp_path / "alone").labels is None


def test_malformed_lists_of_voc_are_one_line(tmp_path):
    main = voc(tmp_path) / "ImageSets" / "Main"
    listing = write(main / "dog_trainval.txt", "000005 -1\n000012  2\n")
    error_of(tmp_path, str(listing), "line 2")
    write(listing, "000005 -1\n000012  1\n000008  1\n")
    error_of(tmp_path, str(listing), "same images", "aeroplane_trainval.txt")
    listing.unlink()
    error_of(tmp_path, str(listing), "no such file")
    for file in (tmp_path / "JPEGImages").iterdir():
        file.unlink()
    (tmp_path / "JPEGImages").rmdir()
    error_of(tmp_path, "JPEGImages", "no such folder", split="test")
