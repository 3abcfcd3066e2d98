"""What a step does: operators, counting, formats, fusion, parameters, layouts. The only place that counts."""
