// SPDX-License-Identifier: Apache-2.0

// Package cniplugin holds the verbs of the CNI plugin (CNI spec 1.1, section
// 2): what ADD, DEL, CHECK, GC and STATUS do with the entry on stdin, the
// documents of the node and the rules in its kernel. It turns errors into CNI
// errors, at one place.
package cniplugin
