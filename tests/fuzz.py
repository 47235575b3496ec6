"""Run the state machines with fresh seeds until stopped: `python -m tests.fuzz`.

Each round runs the machines of the tests with more examples and another seed. On a failure it
prints the shortest reproduction that hypothesis has found, and exits with 1. Ctrl-C ends it.
"""

import argparse
import random
import sys
import time
import traceback

from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.test_manager_model import ManagerMachine, TestManager, WindowMachine
from tests.test_manager_steps import StepMachine
from tests.test_manager_uncached_order import UncachedOrderMachine

MACHINES = (ManagerMachine, WindowMachine, StepMachine, UncachedOrderMachine)


def run_round(number: int, num_examples: int) -> None:
    """Run each machine once; raises what the machine raises."""
    options = settings(
        TestManager.settings,
        max_examples=num_examples,
        phases=[Phase.generate, Phase.shrink],
        database=None,
    )
    for machine in MACHINES:
        run_state_machine_as_test(seed(number)(machine), settings=options)


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when stopped, 1 after a failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="default: no end")
    parser.add_argument("--examples", type=int, default=300, help="a machine and round")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="the first one")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    number = options.seed
    try:
        while time.monotonic() - start < 60 * options.minutes:
            run_round(number, options.examples)
            steps = sum(machine.num_steps for machine in MACHINES)
            minutes = (time.monotonic() - start) / 60
            print(
                f"seed {number}: {steps} steps clean in {minutes:.1f} min, "
                f"{steps / minutes:.0f} steps/min",
                flush=True,
            )
            number += 1
    except KeyboardInterrupt:
        print("stopped")
    except Exception:
        traceback.print_exc()
        again = f"python -m tests.fuzz --seed {number} --examples {options.examples}"
        print(f"seed {number} failed; again: {again}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
