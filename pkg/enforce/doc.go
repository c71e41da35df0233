// SPDX-License-Identifier: Apache-2.0

// Package enforce brings a node to what its documents say: it computes the
// desired rules, observes those in the kernel, and where they differ applies
// and observes again. The plugin's verbs and the reconciler's passes are both
// made of it, which is why neither ever undoes what the other did.
//
// Observe reads and writes nothing; Ensure writes, and needs the lock of the
// dataDir for it. The package knows the store and the port of the backends, but
// no backend and no configuration format.
package enforce
