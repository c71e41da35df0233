// SPDX-License-Identifier: Apache-2.0

// Package yamldoc decodes YAML, of which JSON is a part, as the agents' own
// library does, and says where each key stands.
package yamldoc
