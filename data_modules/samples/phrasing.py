"""List the ways in which the base corpus words its statements.

Nothing here is a question or an instruction, and no wording of a tuning row stands here: tuning is
to teach the format, on top of skills that the base has from statements like these.
"""

# What stands between a cue and its answer. An answer after a space carries that space itself, so
# that the weight of its first token is the answer's.
SAME_LINE = (":", " =", " ->", " =>", " is", " -", " ...", " gives", ",")
NEW_LINE = ("\n", ":\n", " =\n", ".\n", " ->\n", "\n\n")
NEW_LINE_SHARE = 0.4

FILLERS = (
    "It rained all morning.",
    "The paper was a little worn.",
    "Nobody was in a hurry.",
    "The kettle had just boiled.",
    "A dog barked outside.",
    "The window stood open.",
    "That was noted down with care.",
    "The radio played an old song.",
    "The ink had hardly dried.",
    "The rest of the page was empty.",
    "Lunch was late again.",
    "This was checked twice.",
    "The lamp on the desk was still on.",
    "Snow lay on the roofs.",
    "The train left on time.",
    "There was nothing more to say about it.",
    "Some of the chairs were broken.",
    "The clock struck four.",
    "Everything else can wait.",
    "The meeting went on for an hour.",
)

LIST_FACTS = (
    "{list}",
    "List: {list}",
    "Numbers: {list}",
    "The digits were noted as {list}.",
    "On the board: {list}",
    "A row of digits, {list}, was drawn.",
    "Today it was {list}.",
    "We saw {list}.",
    "[{list}]",
    "({list})",
    "digits = {list}",
    "The machine printed {list}.",
    "Input\n{list}",
    "The dice showed {list}.",
    "Someone left {list} on a slip.",
    "row: {list};",
    "numbers\n{list}",
    "The code on the door reads {list}.",
    "Here is a list: {list}",
    "In the log: {list}.",
)

LIST_CUES = {
    "sort": (
        "in order",
        "sorted",
        "sorted list",
        "from low to high",
        "ascending",
        "rising order",
        "smallest first",
        "arranged upwards",
    ),
    "reverse": (
        "reversed",
        "backwards",
        "from back to front",
        "in reverse",
        "last one first",
        "turned around",
        "read from the end",
        "the other way round",
    ),
    "largest": (
        "largest",
        "maximum",
        "the highest digit",
        "biggest",
        "largest number",
        "greatest of them",
        "max",
        "highest",
    ),
    "smallest": (
        "smallest",
        "minimum",
        "the lowest digit",
        "least",
        "smallest number",
        "least of them",
        "min",
        "lowest",
    ),
}

# The cue before the list.
LIST_CUE_FIRST = (
    "{cue} of {list}",
    "{cue} for {list}",
    "{cue}, from {list}",
    "{cue} ({list})",
    "{cue}: {list}",
    "{cue} when we have {list}",
    "{cue} in the row {list}",
    "{cue}\n{list}",
)

LIST_CUE_LAST = (
    "{list} {cue}",
    "{list}, {cue}",
    "{list} ... {cue}",
    "{list}\n{cue}",
)

PERSON_FACTS = (
    "{name} is a {job} from {city}, {age} years old.",
    "{name}, {age}, works as a {job} in {city}.",
    "The {job} {name} lives in {city} and is {age}.",
    "In {city} there is a {job} called {name}, aged {age}.",
    "At the age of {age}, {name} became a {job} in {city}.",
    "{city} has a new {job}: {name}, {age}.",
    "{name} moved to {city} at {age} and is now a {job}.",
    "A {job} of {age} years, {name} was born in {city}.",
    "{name} ({age}) is a {job}. Home is {city}.",
    "For years {name} has been a {job} in {city}; {name} just turned {age}.",
    "They met {name} in {city}. {name} is {age} and a {job} by trade.",
    "Everyone in {city} knows {name}, the {job}, who is {age}.",
    "{age} years old, {name} left {city} to be a {job}.",
    "The best {job} in {city} is {name}, who turned {age} in May.",
    "When {name} was {age}, the family moved to {city}. {name} is a {job} there.",
    "A letter came from {city}: {name}, a {job}, is {age} today.",
    "{name} grew up in {city}. Now {age}, {name} has found work as a {job}.",
    "As a {job}, {name} likes {city}. {name} is {age}.",
    "The form says {name}, {city}, {job}, {age}.",
    "{city}, {age}, {job}: that is {name}.",
    "Meet {name}. Age {age}, {job}, based in {city}.",
    "{name} of {city} is a trained {job} and is {age} years of age.",
    "At {age}, the {job} {name} bought a house in {city}.",
    "{name} would rather be a {job} in {city} than retire at {age}.",
    "Our friend {name} has turned {age}. The {job} still lives in {city}.",
    "Being a {job} suits {name}, who is {age} and comes from {city}.",
    "From {city} comes {name}, {age}. The job: {job}.",
    "One {job}, {name}, aged {age}, took the bus to {city}.",
    "It was {name} who went to {city} at {age}, hired as a {job}.",
    "In her report on {city} she wrote about {name}, {age}, a skilled {job}.",
)

PERSON_CUES = {
    "name": ("name", "Name", "the name", "person", "called", "name of the person"),
    "city": ("city", "City", "the city", "place", "town", "name of the city"),
    "job": ("job", "Job", "the job", "work", "trade", "kind of work"),
    "age": ("age", "Age", "the age", "years", "years old", "age in years"),
}
