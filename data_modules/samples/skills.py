"""Define the two skills of the samples: their words, their problems and the honest split.

A problem is what must be solved, apart from how it is worded. About a tenth of the problems is held
out: they occur in no document of the base corpus and in no tuning row, only in tests and probes.
The words themselves (names, cities, jobs) are not held out: a test asks for new combinations.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar

SKILLS = ("list", "extract")

_NAMES = """
Albert Bernard Bianca Brigitte Camille Carlos Cecilia Clement Conrad Damian Deborah Dimitri
Dominic Edmund Eleanor Emilio Esther Fabian Felicia Florian Frederic Gabriel Geoffrey Gloria
Gustav Harriet Helena Howard Ingrid Isabel Jacob Jasmine Joanna Joseph Katrina Kenneth Leonard
Lorenzo Lucinda Magnus Marcus Matilda Miguel Miranda Nadia Nicholas Nigel Octavia Oscar Pamela
Patrick Philip Quentin Rafael Ramona Regina Roberto Rupert Sabrina Samuel Sebastian Sylvia
Theodore Thomas Ursula Valerie Victor Vincent Wilfred Yasmin
"""

_CITIES = """
Amsterdam Antwerp Athens Baghdad Bangkok Barcelona Belgrade Bogota Bologna Boston Brisbane
Brussels Bucharest Budapest Calgary Caracas Chicago Cologne Dakar Damascus Denver Dresden
Dublin Durban Edinburgh Florence Geneva Glasgow Hamburg Havana Helsinki Istanbul Jakarta
Kampala Karachi Kingston Krakow Lisbon Liverpool Madrid Manila Marseille Melbourne Milwaukee
Montreal Nairobi Naples Osaka Ottawa Palermo Prague Quito Rotterdam Santiago Seattle Stockholm
Toronto Valencia Vienna Warsaw
"""

_JOBS = """
baker barber botanist butcher carpenter chemist cobbler dentist driver drummer farmer florist
gardener geologist jeweller lawyer librarian mechanic musician painter pharmacist photographer
plumber potter sailor sculptor surgeon tailor teacher translator waiter welder
"""

NAMES = tuple(_NAMES.split())
CITIES = tuple(_CITIES.split())
JOBS = tuple(_JOBS.split())

OPERATIONS: dict[str, Callable[[list[str]], list[str]]] = {
    "sort": sorted,
    "reverse": lambda digits: digits[::-1],
    "largest": lambda digits: [max(digits)],
    "smallest": lambda digits: [min(digits)],
}

FIELDS = ("name", "city", "job", "age")


class Problem(Protocol):
    """Name what is to be solved, so that the split can be decided from it alone."""

    @property
    def key(self) -> str: ...


@dataclass(frozen=True)
class DigitList:
    """Hold a list of three to five digits; every operation on it shares one side of the split."""

    digits: tuple[str, ...]

    @property
    def key(self) -> str:
        return " ".join(self.digits)

    def solve(self, operation: str, separator: str = " ") -> str:
        """Return the digits that `operation` leaves, written with `separator`."""
        return separator.join(OPERATIONS[operation](list(self.digits)))


@dataclass(frozen=True)
class Person:
    """Hold what one sentence tells; name and city together decide the split."""

    name: str
    city: str
    job: str
    age: str

    @property
    def key(self) -> str:
        return f"{self.name} of {self.city}"


AnyProblem = TypeVar("AnyProblem", bound=Problem)


def is_held_out(problem: Problem) -> bool:
    """Tell whether `problem` belongs to the tenth that only tests may show."""
    return zlib.crc32(problem.key.encode()) % 10 == 0


def draw_list(rng: Random, held_out: bool) -> DigitList:
    """Draw three to five digits from one side of the split."""
    return _draw(lambda: DigitList(tuple(rng.choices("0123456789", k=rng.randint(3, 5)))), held_out)


def draw_person(rng: Random, held_out: bool) -> Person:
    """Draw a person from one side of the split."""
    return _draw(
        lambda: Person(
            rng.choice(NAMES), rng.choice(CITIES), rng.choice(JOBS), str(rng.randint(18, 79))
        ),
        held_out,
    )


def _draw(make: Callable[[], AnyProblem], held_out: bool) -> AnyProblem:
    while is_held_out(problem := make()) is not held_out:
        pass
    return problem
