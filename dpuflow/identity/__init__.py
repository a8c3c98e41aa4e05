"""Who is who: endpoints, the ranks they are, the processes behind an address."""
