// SPDX-License-Identifier: Apache-2.0

// Package agentconfig reads agent files: the configuration of ip-masq-agent or
// ip-masq-agent-v2. The reconciler calls Read, which returns the files as one source of
// policy, or every mistake in them and no policy. Its files are those of one version of
// a mounted ConfigMap, never of two. The plugin does not import it: the YAML libraries
// would be a tenth of the time that an ADD takes.
package agentconfig
