// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// isVerified reports whether an ADD has nothing to do: this program found the entry valid and the rules
// right, by the files that were read, and nothing has changed since. It is what almost every ADD comes to, so
// it decodes no document and reads no rule, and asks first what costs least. TestHotPath has what it may
// cost. Until it returns, an ADD reads, in this order:
//
//   - the status of its executable (program in plugin/main.go), environment and stdin, plugin.toml
//   - the marker of the dataDir, and the verification cache (sources/HASH.verified)
//   - with a plugin.toml only: the conflists in its cni_conf_dir, and the digests of the entries that the
//     conflist had (attachments/*/HASH.entries)
//   - the ID of the boot; then the attachment is created
//   - the documents (sources/*.json), then record.json and pods.json
//   - the cookie of the network namespace, the generation of the ruleset, and the inode of
//     /sys/module/nf_tables (Driver.Generation in nftables)
//   - with outputAddresses only: the node's addresses. The kernel has no generation for them, so the cache
//     has a digest of those that decide the choice (Enforcer.SameAddresses)
func (n *node) isVerified(a *addition, reading *store.Reading) bool {
	// The entry counts with these files alone, also where the rules are verified by what the reconciler published.
	if !a.entryIsVerified() || !n.hasInputs(a.cache, reading) {
		return false
	}
	if concernsPod(reading, a.pod) && !n.PodsRecorded(reading.State()) {
		return false
	}
	return n.rulesAreVerified(reading, a.cache)
}

// entryIsVerified reports whether this program found the entry of an ADD valid before, for a pod of the same
// subnets.
func (a *addition) entryIsVerified() bool { return a.digest != "" && a.cache.Entry == a.digest }

// digestOf returns the digest of the entry of an ADD, for VerificationCache.Entry. It is apart from Inputs,
// as an ADD needs it before it reads documents, and as DEL and GC, which use Inputs, must not depend on the
// entry.
func (n *node) digestOf(c networkConf, subnets []netip.Prefix) string {
	if c.err != nil {
		return ""
	}
	return store.Digest(append(c.netconf.PolicyTexts(), n.plugin.Program, fmt.Sprint(subnets))...)
}

// hasInputs reports whether the files and the program are those that were verified.
func (n *node) hasInputs(cache store.VerificationCache, reading *store.Reading) bool {
	return cache.Inputs != "" && cache.Inputs == n.Inputs(reading, n.plugin.Program, n.pluginFile)
}

// concernsPod reports whether the files may say something of the pod or its addresses.
func concernsPod(reading *store.Reading, pod store.Pod) bool {
	if !reading.Mentions("nonMasqueradeNamespaces") {
		return false
	}
	names := []string{pod.ContainerID}
	if pod.Namespace != "" {
		names = append(names, pod.Namespace)
	}
	for _, a := range pod.Addresses {
		names = append(names, a.String())
	}
	return reading.Mentions(names...)
}

// rulesAreVerified reports whether the rules are those that the files ask for, as an ADD of this network or
// the reconciler found since they were last changed.
func (n *node) rulesAreVerified(reading *store.Reading, cache store.VerificationCache) bool {
	generation := n.generation()
	if generation == "" {
		return false
	}
	if n.hasInputs(cache, reading) && n.isNow(cache, generation) {
		return true
	}
	// Beside kube-proxy the generation moves all the time, so the active reconciler writes a cache after each
	// commit that left the owned rules alone. It has the version of the program in place of an entry: a
	// plugin of another version may ask for other rules. CHECK and STATUS do not read it, as they report the
	// rules that the kernel has.
	version := n.plugin.Version
	published := n.Dir.Published()
	if version == "" || published.Entry != version {
		return false
	}
	return published.Inputs == n.Inputs(reading, version, n.pluginFile) && n.isNow(published, generation)
}

// isNow reports whether no rule was changed since a cache was written, nor an address that rules depend on.
func (n *node) isNow(cache store.VerificationCache, generation string) bool {
	return cache.Generation == generation && n.SameAddresses(cache.Addresses)
}

// generation returns the generation of the ruleset, "" if it is not known: whatever reads the rules reports
// why.
func (n *node) generation() string {
	if n.plugin.Generation == nil {
		return ""
	}
	generation, err := n.plugin.Generation()
	if err != nil {
		return ""
	}
	return generation.String()
}

// observe reads the rules, and returns what it verified: at the generation from before they were read.
func (n *node) observe(
	ctx context.Context, reading *store.Reading,
) (*enforce.State, store.VerificationCache) {
	state := reading.State()
	generation := ""
	if enforce.HasGeneration(state.Record) {
		generation = n.generation()
	}
	observed := n.Observe(ctx, state.Sources, state.Record)
	return observed, observed.Verified(n.Inputs(reading, n.plugin.Program, n.pluginFile), generation)
}
