// SPDX-License-Identifier: Apache-2.0

// Package netfilter is the interface that a backend of masquerade rules implements, with the choice of the
// backend for a chain. Package enforce and the reconciler call it; the backends in the packages below import
// it for its types, and only a main package imports them. Every write goes through Apply or Remove with the
// lock of the dataDir held.
package netfilter
