// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// collector makes metrics of a reading. They are all of one moment.
type collector struct {
	read func() reading

	ready, notReady                  *prometheus.Desc
	conflist, war, foreign           *prometheus.Desc
	valid, hash, written             *prometheus.Desc
	conflicts, prefixes, connections *prometheus.Desc
	backend, plugin                  *prometheus.Desc
}

func newCollector(read func() reading) *collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("ip_masq_"+name, help, labels, nil)
	}
	return &collector{
		read:     read,
		ready:    desc("ready", "1 if the rules are what the sources ask for, as /readyz says; else 0."),
		notReady: desc("not_ready", "Whether the node is not ready for this reason (1) or not (0).", "reason"),
		conflist: desc("conflist_present",
			"1 if the network that runtimes pick, the first in the CNI configuration directory, has an entry of ip-masq; else 0. "+
				"With conflist.manage it is the one that conflist.network names, if it names one."),
		war: desc("conflist_war",
			"1 if somebody removes our entry from the conflist again and again, as /readyz says; else 0. With conflist.manage alone."),
		foreign: desc("foreign_rules", "Rules of others that get in the way of the policy; doctor names them."),
		valid: desc("source_valid",
			"1 if what the source states can be used; 0 if not, and then the last good of it, if any, is in force.", "source"),
		hash: desc("source_hash",
			"The first 48 bits of the SHA-256 of what the source states, as a number: equal on nodes that have the same in force.", "source"),
		written:   desc("source_last_written_timestamp_seconds", "When the document of what the source states was last written.", "source"),
		conflicts: desc("policy_conflict", "Contradictions between the sources of the chain.", "chain"),
		prefixes:  desc("prefixes", "Destination prefixes of the policy, by what happens to what is sent there.", "chain", "family", "action"),
		connections: desc("connections_total",
			"Connections that the rules of the chain decided about, as the kernel counted their first packets.", "chain", "family", "action"),
		backend: desc("backend_info", "Always 1; the labels tell what keeps rules in the kernel.", "backend", "variant"),
		plugin:  desc("plugin_info", "Always 1; the label tells the version of the CNI plugin that is installed.", "version"),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.ready, c.notReady, c.conflist, c.war, c.foreign, c.valid, c.hash, c.written, c.conflicts, c.prefixes, c.connections, c.backend, c.plugin,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	r := c.read()
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	gauge(c.ready, truth(len(r.unready) == 0))
	for _, name := range reasonNames() {
		gauge(c.notReady, truth(r.unready[name]), name)
	}
	if r.conflist != nil {
		gauge(c.conflist, truth(*r.conflist))
	}
	if r.war != nil {
		gauge(c.war, truth(*r.war))
	}
	if r.foreign != nil {
		gauge(c.foreign, float64(*r.foreign))
	}
	for _, s := range r.sources {
		gauge(c.valid, truth(s.valid), s.name)
		if s.statement == nil {
			continue
		}
		if hash, err := hashOf(s.statement); err != nil {
			out <- prometheus.NewInvalidMetric(c.hash, err)
		} else {
			gauge(c.hash, float64(hash), s.name)
		}
		if at, known := r.written[s.SourceID]; known {
			gauge(c.written, timestamp(at), s.name)
		}
	}
	for chain, n := range r.conflicts {
		gauge(c.conflicts, float64(n), chain)
	}
	for s, n := range r.prefixes {
		gauge(c.prefixes, float64(n), s.labels()...)
	}
	for _, t := range r.totals {
		out <- prometheus.MustNewConstMetric(c.connections, prometheus.CounterValue, float64(t.count), t.labels()...)
	}
	for _, b := range r.backends {
		gauge(c.backend, 1, b.name, b.variant)
	}
	if r.plugin != "" {
		gauge(c.plugin, 1, label(r.plugin))
	}
}

func (s series) labels() []string { return []string{s.chain, string(s.family), string(s.action)} }

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// hashOf returns a number that tells what a source states from anything else:
// 48 bits, which a float64 holds exactly.
func hashOf(s *policy.SourcePolicy) (uint64, error) {
	doc, err := json.Marshal(s)
	if err != nil {
		return 0, err
	}
	sum := sha256.Sum256(doc)
	return binary.BigEndian.Uint64(sum[:8]) >> 16, nil
}
