// SPDX-License-Identifier: Apache-2.0

// Package netfilter is the interface that a backend of masquerade rules implements, with the choice
// of the backend for a chain. Package enforce and the reconciler call it; the backends import it
// for its types and DecodeRule. GuardTables is the interface of the tables ip-masq-guard, which
// exist beside any backend. Its invariant: every write goes through Apply, Remove or ApplyGuards
// with the lock of the dataDir held.
package netfilter
