"""The configuration that the reference's published searches start from: one device of 300 W, 38 billion parameters."""

from __future__ import annotations

from flopwise.references.deepflow.configuration import Configuration, DeepflowTechnology, LanguageModel, Power

PUBLISHED = Configuration(
    technology=DeepflowTechnology(
        core_energy_per_flop_j=119e-13,
        dram_energy_per_bit_j=6e-12,
        l2_energy_per_bit_j=5e-15,
        shared_energy_per_bit_j=1e-15,
        network_energy_per_bit_j=10e-12,
        dram_stack_bytes=4 * 2**30,
        dram_stack_bytes_per_s=225 * 2**30,
        l2_bank_bytes=32 * 2**10,
        l2_bank_bytes_per_s=4000 * 2**30,
        shared_bank_bytes=32 * 2**10,
        shared_bank_bytes_per_s=4000 * 2**30,
        line_latency_s=16e-7,
        launch_s=37e-6,
    ),
    power=Power(
        budget_w=300, core=0.2592, dram=0.2592, l2=0.16896000000000005, shared=0.20275200000000007, network=0.2
    ),
    model=LanguageModel(
        batch_sequences=512,
        vocab=800_000,
        layers=2,
        hidden=19_968,
        projection=2_048,
        sequence_tokens=20,
    ),
)
"""From nanocad-lab/DeepFlow, `search_scripts/hw_architecture/membw_batch/data_scale100`, June 2019."""
