"""What a run will cost, before it runs: pure arithmetic over a model, a layout and a machine."""
