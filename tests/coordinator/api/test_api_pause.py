"""Clients of a group that is lost and replaced: they wait, and nothing they asked for is lost."""

import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import gearshift
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.proto.errors import GearshiftError
from gearshift.proto.ids import Layout
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.api_group import CONTEXT, SPEC, VOCAB, answer_ids, letters, letters_tokenizer
from gearshift.tests.helpers.fake_group import FakeGroup
from gearshift.tests.helpers.mortal_group import MortalGroup
from gearshift.tests.helpers.serving import service_of, serving

WAIT_SECONDS = 10.0


def test_clients_are_greeted_in_the_pause_and_all_answers_are_whole() -> None:
    group = MortalGroup(lambda life: FakeGroup(2, (400, 400), vocab=VOCAB, random=Random(life)), [24])
    placement = place(SPEC, 2)
    settings = DriverSettings(CONTEXT, 64, prefill=Layout.LAYER, decode=Layout.TENSOR, parallel_requests=8)
    driver = Driver(group, SPEC, placement, settings)
    driver.load()
    paused, go_on = threading.Event(), threading.Event()

    def regroup(error: GearshiftError) -> None:
        paused.set()
        assert go_on.wait(WAIT_SECONDS)
        group.regroup(error)

    driver.restart_by(regroup)
    with (
        serving(driver, service_of(driver, placement, letters_tokenizer())) as running,
        gearshift.Client(running.address) as anna,
        ThreadPoolExecutor(1) as pool,
    ):
        given = anna.generate("abc", max_tokens=60, temperature=0.0)
        assert paused.wait(WAIT_SECONDS)
        with gearshift.Client(running.address) as ben:  # greeted, though no group runs
            asked = pool.submit(ben.generate, "xyz", max_tokens=20, temperature=0.0)
            go_on.set()
            assert "".join(given) == letters(answer_ids("abc", 60))
            result = given.result()
            assert (result.facts.restarts, result.prompt_tokens, len(result.tokens)) == (1, 3, 60)
            assert asked.result(WAIT_SECONDS).result().text == letters(answer_ids("xyz", 20))
            status = anna.status()
            assert (status.state, status.restarts, status.queue.open) == ("serving", 1, 0)
