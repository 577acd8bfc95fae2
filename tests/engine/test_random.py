import numpy as np

from hpcgen.engine.random import philox, uniform


def test_philox_gives_the_known_answers_of_its_authors() -> None:
    """From Random123's kat_vectors, philox4x32 10 rounds."""
    ones, pi = 0xFFFFFFFF, ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0])
    counter = np.array([[0] * 4, [ones] * 4, pi[0]], dtype=np.uint32)
    key = np.array([[0] * 2, [ones] * 2, pi[1]], dtype=np.uint32)
    assert philox(counter, key).tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


def test_a_number_depends_on_its_key_and_position_alone() -> None:
    keys = np.array([5, 2**63 + 1, 5], dtype=np.uint64)
    positions = np.array([7, 0, 8], dtype=np.uint64)
    together = uniform(keys, positions)
    apart = [uniform(keys[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == apart and len(set(apart)) == 3


def test_numbers_are_uniform() -> None:
    numbers = uniform(np.arange(20_000, dtype=np.uint64), np.full(20_000, 3, dtype=np.uint64))
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    # chi-square with 19 degrees of freedom; 45 is beyond its 99.9th percentile
    assert ((counts - 1000) ** 2 / 1000).sum() < 45
