"""Keys such as `hollow-lantern`: an adjective and a noun, plain English, many thousands of them."""

from __future__ import annotations

import random

from .words import CLASSES, POOL

ADJECTIVES: tuple[str, ...] = tuple(
    """
    able ample angry bitter bold brave brief brisk broad broken busy calm careful cheap chilly clean clear clever
    clumsy cold common complete crisp crowded curious curly daily damp dark dear deep dense distant dizzy double dry
    dull dusty eager early easy elder empty endless even exact faint fair familiar famous fancy fast fierce firm flat
    fluffy formal fragile frank fresh friendly full funny gentle giant glad graceful grand grateful great happy hard
    hasty healthy heavy helpful hidden high hollow honest hot huge humble hungry icy ideal idle jolly juicy keen kind
    large late lazy lean level light likely little lively local lonely long loose loud lovely low loyal lucky mad
    major mellow mild minor modest muddy narrow neat new nimble noble noisy odd old open ordinary pale patient perfect
    plain pleasant polite poor precious pretty private prompt proper proud public pure quick quiet rapid rare raw
    ready real rich ripe rough round royal rude rusty sad safe salty secret serious shaky shallow sharp shiny shy
    silent silly simple single sleepy slim slow small smooth soft solid sour spare special spicy steady steep sticky
    stiff still strange strict strong sturdy sudden sunny sweet swift tall tame tender thick thin tidy tight tiny
    tired tough true typical unusual upset useful usual vague vast violent visible vivid warm wary weak wealthy weary
    wet whole wide wild windy wise wooden worn worried young
    """.split()
)
NOUNS: tuple[str, ...] = (*POOL, *(word for members in CLASSES.values() for word in members))


def random_key(rng: random.Random) -> str:
    """An adjective and a noun, joined by a hyphen."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
