// SPDX-License-Identifier: Apache-2.0

// Package config decodes the configuration documents except agent files: the plugin entry that a
// runtime hands over, conflists, plugin.toml, reconciler.toml with its flags. One table of policy keys
// serves all of them, and agentconfig too; every value reaches its key as JSON. The plugin, the
// reconciler and the packages that edit or check conflists call it. A document is accepted as a
// whole or refused with all of its mistakes, each with its key, item, value and remedy on one
// line of valid UTF-8 and of bounded length.
package config
