"""MNIST and Fashion-MNIST: idx files of the same names, told apart by their folders."""

from __future__ import annotations

from protosteer.data.datasets.base import NUMERALS, DatasetInfo, arrays
from protosteer.data.datasets.idx import idx_files, read_halves
from protosteer.data.downloads import Remote

CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
MNIST_PAGES = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "http://yann.lecun.com/exdb/mnist",
)
FASHION_PAGES = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
)

MNIST = DatasetInfo(
    name="mnist",
    title="MNIST",
    classes=10,
    licence="CC BY-SA 3.0",
    source="http://yann.lecun.com/exdb/mnist/",
    find=idx_files,
    read=lambda files, reading: arrays(NUMERALS, *read_halves(files)),
    files=(
        Remote("train-images-idx3-ubyte.gz", 9_912_422, MNIST_PAGES, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        Remote("train-labels-idx1-ubyte.gz", 28_881, MNIST_PAGES, "d53e105ee54ea40749a09fcbcd1e9432"),
        Remote("t10k-images-idx3-ubyte.gz", 1_648_877, MNIST_PAGES, "9fb629c4189551a2d022fa330f9573f3"),
        Remote("t10k-labels-idx1-ubyte.gz", 4_542, MNIST_PAGES, "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    folders=("MNIST/raw", "MNIST"),
    md5={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    own_folder=True,
)

FASHION_MNIST = DatasetInfo(
    name="fashion-mnist",
    title="Fashion-MNIST",
    classes=10,
    licence="MIT",
    source="https://github.com/zalandoresearch/fashion-mnist",
    find=idx_files,
    read=lambda files, reading: arrays(CLOTHES, *read_halves(files)),
    files=(
        Remote("train-images-idx3-ubyte.gz", 26_421_880, FASHION_PAGES, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Remote("train-labels-idx1-ubyte.gz", 29_515, FASHION_PAGES, "25c81989df183df01b3e8a0aad5dffbe"),
        Remote("t10k-images-idx3-ubyte.gz", 4_422_102, FASHION_PAGES, "bef4ecab320f06d8554ea6380940ec79"),
        Remote("t10k-labels-idx1-ubyte.gz", 5_148, FASHION_PAGES, "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    folders=("FashionMNIST/raw", "FashionMNIST"),
    own_folder=True,
)
