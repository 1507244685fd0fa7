"""The words of the synthetic tasks: plain English, each a single token of the embedded tokenizer."""

from __future__ import annotations

import random

POOL: tuple[str, ...] = tuple(
    """
    maple cedar walnut willow birch aspen spruce laurel juniper hazel alder poplar acacia bamboo clover
    fern amber coral ivory crimson scarlet violet indigo teal olive bronze silver copper golden azure
    magenta turquoise harbor meadow canyon glacier desert lagoon island valley summit prairie delta cavern
    plateau marsh forest reef lantern candle mirror basket blanket pillow kettle ladder bucket curtain
    saddle anchor compass helmet ribbon marble castle temple palace cottage tower bridge tunnel chapel
    market garden stable cabin bakery theater museum fountain thunder blizzard rainbow sunrise sunset
    eclipse breeze frost mist drizzle twilight midnight dawn dusk comet meteor planet orbit galaxy nebula
    crater rocket saturn jupiter neptune mercury venus pluto cosmos lunar solar stellar falcon badger
    beaver panther leopard cheetah giraffe buffalo gazelle walrus dolphin lobster octopus penguin pelican
    toucan pepper ginger garlic saffron vanilla cinnamon nutmeg basil parsley mustard honey butter biscuit
    pancake noodle pretzel guitar trumpet flute cello banjo harp bugle cymbal piano ballad melody chorus
    sonnet rhythm tempo opera wizard knight captain pirate sailor hunter shepherd merchant monarch emperor
    baron duchess herald scholar pilgrim nomad velvet cotton linen satin leather denim flannel canvas
    tweed lace wool felt fleece nylon burlap muslin granite quartz topaz emerald sapphire diamond garnet
    opal jade pearl onyx basalt pebble boulder cobalt nickel river ocean puddle stream geyser rapids
    torrent ripple spring cascade fjord strait gulf bay cove inlet magnet piston turbine engine pulley
    gearbox bearing battery circuit antenna beacon camera sensor lever valve wheel oxford boston dublin
    cairo lisbon madrid vienna athens berlin tokyo denver dallas geneva havana nairobi oslo
    """.split()
)
"""Keys, values, names, labels and span words. No two roles share a word in one sample."""

CLASSES: dict[str, tuple[str, ...]] = {
    "bird": tuple("sparrow robin eagle owl crow swan goose duck heron stork finch wren".split()),
    "fruit": tuple("apple banana cherry grape lemon mango peach pear plum orange melon kiwi".split()),
    "tool": tuple("hammer wrench chisel drill pliers shovel rake axe saw screwdriver trowel mallet".split()),
    "clothing": tuple("shirt jacket trousers sock glove scarf sweater skirt coat hat boot sandal".split()),
    "vehicle": tuple("truck bicycle tram bus scooter taxi train ferry tractor van canoe wagon".split()),
    "body": tuple("elbow knee shoulder ankle wrist finger thumb neck chin nose ear toe".split()),
    "furniture": tuple("table chair sofa desk shelf bed stool bench cupboard wardrobe dresser couch".split()),
    "drink": tuple("coffee tea juice milk cider wine beer soda lemonade cocoa water whisky".split()),
}
"""Few-shot inputs by class. The classes have meaning, the labels given to them in a sample have none."""


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
"""Keys such as `hollow-lantern`: an adjective and one of these, many thousands of them."""


def random_key(rng: random.Random) -> str:
    """An adjective and a noun, joined by a hyphen."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


class Words:
    """Hands out the pool in random order, each word once, so that the parts of one sample never collide."""

    def __init__(self, rng: random.Random) -> None:
        self._left = rng.sample(POOL, len(POOL))

    def take(self, count: int) -> list[str]:
        if count > len(self._left):
            raise ValueError(f"{count} more words asked for, {len(self._left)} left of {len(POOL)}")
        taken, self._left = self._left[:count], self._left[count:]
        return taken
