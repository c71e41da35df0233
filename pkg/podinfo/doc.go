// SPDX-License-Identifier: Apache-2.0

// Package podinfo reads whose interface an attachment is: names of the pod from CNI_ARGS and its addresses
// from the result of an ADD. The plugin reads both as its runtime hands them over; the reconciler reads them
// from the cache in which the runtime's libcni keeps them, for pods that had no ADD of the plugin. The
// package returns values and writes nothing. Its invariant: Names, Networks and Addresses check both.
package podinfo
