// SPDX-License-Identifier: Apache-2.0

// Package metrics serves the HTTP endpoints of the reconciler. The reconciler's
// main passes it the report of each sync. Its invariants:
// counters never fall while the process lives, also when rules are recreated; what it keeps and
// exports is bounded, whatever a configuration names; health never waits for a scrape or the kernel;
// and it writes nothing.
package metrics
