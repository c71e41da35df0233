// SPDX-License-Identifier: Apache-2.0

// Package diagnose finds what on a node defeats the policy, will break it, or will
// surprise whoever reads it: rules of others, plugins and agents that masquerade
// too, settings of the kernel, files that are loaded at boot.
//
// Its invariant: it only reads, and no check hides another. What a check could
// not look at is a finding itself. A finding's ID is stable, and there is at most
// one of each; what it was found in is in its details.
//
// Besides the node it looks at what callers have read already: documents, the
// view of the rules, conflists. It knows the port of the backends and the reader
// of others' rules, but no backend. The reconciler may import it.
package diagnose
