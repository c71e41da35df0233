// SPDX-License-Identifier: Apache-2.0

// Package cniplugin implements the CNI verbs (CNI spec 1.1, section 2). ADD, DEL, CHECK, GC and
// STATUS read the configuration on stdin, the documents of the node and the rules in its kernel.
// The plugin's main calls it. An ADD succeeds only if its entry is in force and the rules of its chain are
// right. There is one exception: beside a document, a record or rules that a newer version wrote, it changes
// nothing, and passes with a warning if its chain exists. A DEL never fails because of the node's state.
package cniplugin
