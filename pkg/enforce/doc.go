// SPDX-License-Identifier: Apache-2.0

// Package enforce makes the rules in the kernel those that the documents of a node ask for. It
// computes the desired rules, observes those in the kernel, applies the difference to exactly what
// it observed, then observes again. The plugin's verbs and the reconciler's syncs call it with the
// lock of the dataDir; because both use this package, neither reverts what the other did. It knows
// the store and the port of the backends, but no backend and no file format.
package enforce
