"""TRANSFER rows in, EXCHANGE rows out: data with its offer, grant and completion. Knows no operation."""
