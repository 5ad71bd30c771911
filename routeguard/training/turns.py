"""One guard serves one Trainer at a time: what is said to a second one too early, and to a first one too late."""

TOO_EARLY = (
    "this RouteGuard is in another Trainer, which has not trained yet. Give each Trainer a guard of its own, or train "
    "the first before the second is made; guard.detach() takes the guard out of the first"
)
TOO_LATE = (
    "this RouteGuard has gone on to another Trainer and guards this one no longer. Give each Trainer a guard of its own"
)
