"""A coordinator process for tests that kill it: joins fake workers, prints the pids below it, then listens."""

import json
import os
import sys

import psutil

from gearshift.launch.processes.local import local_cluster
from gearshift.launch.processes.signals import exit_on_signals

if __name__ == "__main__":
    with exit_on_signals():
        print("begun", flush=True)
        with local_cluster(workers=2, worker_module="gearshift.tests.helpers.fake_worker") as cluster:
            below = [child.pid for child in psutil.Process(os.getpid()).children(recursive=True)]
            print(json.dumps(below), flush=True)
            cluster.receive(120)
    sys.exit(0)
