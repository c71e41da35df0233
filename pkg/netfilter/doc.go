// SPDX-License-Identifier: Apache-2.0

// Package netfilter is the interface that a backend of masquerade rules implements, with the choice of the
// backend for a chain. Package enforce and the reconciler call it. The backends in the packages below import
// it for its types and DecodeRule; the main packages import the backends, and thirdparty imports iptables for its reader of
// iptables-legacy. GuardTables is the interface of the tables ip-masq-guard, which exist beside any backend. Every
// write goes through Apply, Remove or ApplyGuards with the lock of the dataDir held.
package netfilter
