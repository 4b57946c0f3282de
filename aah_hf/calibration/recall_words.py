"""The sentences, keys and values of recall text. Data only; the two splits share nothing."""

from __future__ import annotations


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


# (the fact up to its value, the question up to the answer, kind of value)
TEMPLATES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "calibration": (
        ("The access code of the {key} is", "Question: what is the access code of the {key}? Answer:", "number"),
        ("The serial number of the {key} is", "As noted above, the serial number of the {key} is", "number"),
        ("The password for the {key} is", "To open it, the password for the {key} is", "words"),
        ("Locker number of the {key}:", "Remember the locker number of the {key}:", "number"),
        ("The keeper of the {key} is called", "Question: who keeps the {key}? The keeper is called", "words"),
        ("The {key} was registered under", "The entry says that the {key} was registered under", "number"),
        ("The {key} is stored in room", "We can find it again: the {key} is stored in room", "number"),
        ("The code name of the {key} is", "In the files, the code name of the {key} is", "words"),
        (
            "The {key} was sold for a price of",
            "Question: what did the {key} cost? It was sold for a price of",
            "number",
        ),
        ("The phone extension of the {key} is", "Please dial the phone extension of the {key}:", "number"),
        ("The {key} answers to the call sign", "On the radio, the {key} answers to the call sign", "words"),
        ("The ticket for the {key} has number", "Show the ticket for the {key}; it has number", "number"),
        ("The secret phrase of the {key} is", "Question: which secret phrase has the {key}? Answer:", "words"),
        ("The {key} holds record", "According to the list, the {key} holds record", "number"),
    ),
    "evaluation": (
        ("The magic number of the {key} is", "Question: what is the magic number of the {key}? Answer:", "number"),
        ("The postal code of the {key} is", "As mentioned before, the postal code of the {key} is", "number"),
        ("The nickname of the {key} is", "Among friends, the nickname of the {key} is", "words"),
        ("The {key} carries the inventory label", "The inspector reads on the {key} the label", "number"),
        ("The owner of the {key} signs as", "Question: how does the owner of the {key} sign? He signs as", "words"),
        ("The {key} has the account number", "For the transfer, the {key} has the account number", "number"),
        ("The combination of the {key} is", "Turn the dial; the combination of the {key} is", "number"),
        ("The watchword of the {key} is", "The guard asks for the watchword of the {key}. It is", "words"),
        ("The {key} was built from plan", "Question: from which plan was the {key} built? From plan", "number"),
        ("The file about the {key} has index", "In the archive, the file about the {key} has index", "number"),
    ),
}

ADJECTIVES = _list("old|small|northern|quiet|broken|golden|western|hidden|narrow|public")
KEYS = {
    "calibration": _list(
        "tower|bridge|harbor|library|station|museum|mill|garden|castle|lighthouse|workshop|warehouse|chapel|ferry"
    ),
    "evaluation": _list("palace|tunnel|market|theater|brewery|stadium|hospital|bakery|cottage|airport|temple|granary"),
}
WORDS = {
    "calibration": _list(
        "amber|copper|silver|crimson|velvet|marble|cedar|falcon|otter|badger|heron|lantern|anchor|compass|violin|saddle"
    ),
    "evaluation": _list(
        "ivory|cobalt|scarlet|emerald|willow|granite|raven|beaver|salmon|panther|candle|hammer|trumpet|barrel|mirror"
    ),
}

# filler: "<Subject> <action><ending>."
SUBJECTS = _list(
    "the committee|a traveller|the engineer|my neighbour|the river|the morning train|an old friend|the gardener|"
    "the council|a young painter|the weather|the local newspaper|the teacher|a small company|the captain|the audience"
)
ACTIONS = _list(
    "waited for a long time|described the plan in detail|changed very little over the years|"
    "arrived later than expected|was mentioned in several letters|could be seen from the hill|spoke about the harvest|"
    "kept a record of every visit|had been there since spring|preferred the road along the coast|"
    "made no difference to the result|was careful to explain the reasons|"
    "met with some resistance at first|followed the usual procedure"
)
ENDINGS = _list(
    "|, as everyone knew|, although nobody had asked for it|, and the day went on|, which surprised some of the guests|"
    ", because the work was not finished|, at least in the beginning|, according to the report|, without any hurry"
)
