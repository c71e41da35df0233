// SPDX-License-Identifier: Apache-2.0

// Package config parses the configuration documents of a node: the plugin entry that a runtime
// hands over, the conflists on disk, plugin.toml, and the reconciler's file with its flags. One
// table of policy keys serves all of them, and agentconfig too; every value reaches its key as
// JSON. The plugin, the reconciler and the packages that edit or check conflists call it. Its
// invariant: a document is accepted as a whole or refused with all of its mistakes, each of which
// names the key, the item, the value and the remedy on one bounded line of valid UTF-8.
package config
