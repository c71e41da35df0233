// SPDX-License-Identifier: Apache-2.0

// Package enforce makes the kernel's rules those of the documents. It computes the desired rules,
// observes those in the kernel, applies the difference, then observes again. The plugin's verbs and
// the reconciler's syncs call it, to observe without a lock and to write with the lock of the
// dataDir; because both use this package, neither reverts what the other did. It knows the store and
// the interface of the backends, but no backend and no file format.
package enforce
