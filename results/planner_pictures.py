"""Pictures of the planner, from data sheets: `python results/planner_pictures.py` writes results/*.svg."""

import argparse
from pathlib import Path

import numpy as np

from hpcgen.planner.costs import Costs
from hpcgen.planner.hardware import load_cluster
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.pictures import draw_completion, draw_layers, draw_roofline, draw_timeline
from hpcgen.planner.search import Memory, choose
from hpcgen.planner.simulator import Simulation
from hpcgen.planner.workload import Workload, draw

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="not used: the model is DeepSeek-R1 of configs/published")
    parser.parse_args()
    count = 4000
    load = Workload.of(
        draw("lognormal:500:0.5", count), draw("lognormal:1000:0.7:8192", count, 1), np.full(count, 8192)
    )
    shape = ModelShape.read(HERE.parent / "configs" / "published" / "deepseek_r1.json")
    hardware = load_cluster("h20x16")
    costs, memory = Costs.from_hardware(shape, hardware), Memory.of(hardware)
    choice = choose(costs, 16, 8, memory, load)
    outcome = Simulation(costs, choice.configuration, load).run()
    draw_timeline(outcome.spans, HERE / "planner_timeline.svg")
    draw_roofline(costs, choice, load, HERE / "planner_roofline.svg")
    draw_layers(costs, choice, load, HERE / "planner_layers.svg")
    nodes = [2, 4, 8, 16]
    seconds: dict[str, list[float]] = {}
    for kind in ("h20", "h200"):
        hardware = load_cluster(f"{kind}x8")
        costs, memory = Costs.from_hardware(shape, hardware), Memory.of(hardware)
        seconds[f"DeepSeek-R1, {hardware.name}"] = [
            Simulation(costs, choose(costs, 8 * n, 8, memory, load).configuration, load).run().seconds for n in nodes
        ]
    draw_completion(nodes, seconds, HERE / "planner_nodes.svg")


if __name__ == "__main__":
    main()
