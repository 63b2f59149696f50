"""The pictures of head groups: every group has a panel, and maps are what they show."""

import pathlib
import re

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import zoo
from tests.layers import kinds
from tools import attention_patterns

# Each layer is called once.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("eager")]
ACCEPTED = ("yes", "same length", "with one round")
# Thresholds change who chooses a cluster, not how its panel looks.
EXPORTED = set(kinds.exported().values()) - {zoo.ThresholdHeads}
PAGE = pathlib.Path(__file__).parents[1] / "docs/choosing_heads.md"


def panels():
    """All panels of sequences."""
    return [
        panel for family in attention_patterns.FAMILIES.values() for panel in family()
    ]


def test_every_group_has_a_panel_or_none_to_show():
    drawn = {type(group) for panel in panels() for group in panel.groups}
    assert drawn | set(attention_patterns.NO_MAP) == EXPORTED
    assert not drawn & set(attention_patterns.NO_MAP)


@pytest.mark.parametrize("name", attention_patterns.FAMILIES)
@pytest.mark.thorough
def test_queries_see_nothing_later_where_they_may_not(name):
    length = attention_patterns.SHORT_LENGTH
    x = attention_patterns.contents(length)
    found = attention_patterns.maps(attention_patterns.FAMILIES[name](), x, True)
    later = np.triu(np.ones((length, length), bool), 1)
    for panel, weights in found:
        assert weights.shape == (length, length)
        assert (weights[later] == 0).all() == panel.has_causal_form, panel.name
        assert weights.any(), panel.name


def test_a_sliding_window_is_drawn():
    heads = [layers.SlidingHeads(1, 2)]
    panel = attention_patterns.Panel("window", "SlidingHeads", heads)
    ((_, weights),) = attention_patterns.maps(
        [panel], attention_patterns.contents(5), causal=True
    )
    expected = np.tri(5) - np.tri(5, k=-3)
    np.testing.assert_array_equal(attention_patterns.seen(weights, False), expected)
    shaded = attention_patterns.seen(weights, True)
    np.testing.assert_array_equal(shaded > 0, expected)
    np.testing.assert_allclose(shaded.max(axis=1), 1.0)


def test_multipole_heads_see_all_earlier_pairs_in_one_way():
    *parts, everything = attention_patterns.multipole(causal=True).values()
    assert all((part > 0).any() for part in parts)
    np.testing.assert_array_equal(sum(parts), everything)
    np.testing.assert_array_equal(everything > 0, np.tri(attention_patterns.LENGTH))


def table(heading):
    """Returns the cells of the lines of a documented table below its heading."""
    lines = PAGE.read_text().partition(heading)[2].partition("\n\n")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def groups():
    """Returns the cells of the table of all groups, by the name of the group."""
    return {name.strip("`"): cells for name, *cells in table("| group |")}


def test_the_page_has_every_group_and_every_picture():
    assert set(groups()) == {cls.__name__ for cls in kinds.exported().values()}
    for family in (*attention_patterns.FAMILIES, "images"):
        assert f"](head_groups_{family}.png)" in PAGE.read_text()


def test_the_page_tells_causal_forms():
    forms = {name: form for name, (_, form, _, _) in groups().items()}
    for panel in panels():
        form = "yes" if panel.has_causal_form else "no"
        assert {forms[type(group).__name__] for group in panel.groups} == {form}
    (nsa,) = attention_patterns.NO_MAP
    assert forms[nsa.__name__] == "only"


def test_the_table_of_systems_names_what_there_is():
    """The 33 systems of the survey, four of today, and their causal forms."""
    rows, known = table("| system |"), {*dir(layers), *zoo.__all__}
    assert len(rows) == 33 + 4
    for system, classes, causal, decodes, *_ in rows:
        names = re.findall(r"`(\w+)", classes)
        assert names and known.issuperset(names), system
        found = groups().get(names[0])
        if found is not None:
            assert causal == found[1], system
            assert decodes == ("no" if causal == "no" else "yes"), system


def name_of(panel):
    """The name of the only group of a panel, as the page has it."""
    (group,) = panel.groups
    return type(group).__name__


def single_panels():
    """The panels of one group each that is made in the manner of the tables."""
    return [
        panel
        for panel in panels()
        if len(panel.groups) == 1 and panel.name != "SlidingHeads, strided"
    ]


def test_the_page_tells_what_decoding_remembers():
    states = {}
    for number, (_, names) in enumerate(table("| state of a head |")):
        for name in re.findall(r"`(\w+)`", names):
            states[name] = number
    for panel in single_panels():
        if not panel.has_causal_form:
            continue
        attention = layers.MixedAttention(panel.groups, key_dim=4)
        attention.build((1, 32, attention_patterns.DIM))
        shorter, longer = (
            sum(np.size(x) for x in keras.tree.flatten(attention.make_cache(1, length)))
            for length in (16, 32)
        )
        growth = longer / shorter
        # The same; a number for each token; a fraction of all tokens; all tokens.
        expected = np.searchsorted([1.0, 1.1, 1.9], growth)
        assert states[name_of(panel)] == expected, panel.name


@pytest.mark.thorough
def test_the_page_tells_who_attends_to_another_sequence():
    may = {name: cell for name, (*_, cell) in groups().items()}
    x, value = (attention_patterns.contents(16, seed) for seed in (0, 1))
    for panel in single_panels():
        if panel.needs_causal_mask or panel.name == "ReformerHeads":
            continue
        attention = layers.MixedAttention(panel.groups, key_dim=4)
        accepted = True
        try:
            attention(x, value)
        except ValueError:
            accepted = False
        assert accepted == (may[name_of(panel)] in ACCEPTED), panel.name
