// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"maps"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/podinfo"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// cachedPods records pods that started before the plugin entry was in the conflist, from the runtime's cache.
type cachedPods struct {
	cache    podinfo.Cache
	networks []string                       // that have a plugin entry
	seen     map[store.Attachment]time.Time // what was decided, by the time of the file
	recorded map[store.Attachment]bool      // of seen; nil before the first sync
	fresh    bool                           // some may not be in the rules yet
}

// syncCachedPods records the pods of networks with a plugin entry that have no record, and forgets those whose file is
// gone. A file that was decided about counts again after it is written again, or another network has an entry: a DEL
// of the plugin comes before the runtime removes the file. It returns whether it changed records.
func (n *Node) syncCachedPods(r *Report) (changed bool) {
	c, src := n.cached, r.Sources
	if c.cache.Dir == "" || r.OtherDataDir != nil || src.PluginFileErr != nil {
		return false
	}
	cached, err := c.cache.Read(booted())
	if err != nil {
		r.warn(err)
		return false
	}
	present := make(map[store.Attachment]podinfo.Cached, len(cached))
	for _, x := range cached {
		present[store.Attachment{Network: x.Network, ContainerID: x.ContainerID, IfName: x.IfName}] = x
	}
	c.begin(n, r, present)
	for a := range c.recorded {
		if _, is := present[a]; !is {
			r.warn(n.Dir.DetachCached(a))
			delete(c.recorded, a)
			changed = true
		}
	}
	maps.DeleteFunc(c.seen, func(a store.Attachment, _ time.Time) bool { _, is := present[a]; return !is })
	for a, x := range present {
		if at, seen := c.seen[a]; seen && at.Equal(x.Written) {
			continue
		}
		list := src.PluginFile.Conflist(src.ConfDir, x.Network)
		if list == nil || src.PluginFile.Present && !x.SameConfig(list.Doc, config.PluginType) {
			c.seen[a] = x.Written
			continue
		}
		recorded, err := n.recordCached(a, x, c.recorded[a])
		if r.warn(err); err != nil {
			continue // it is tried again
		}
		if c.seen[a] = x.Written; recorded {
			c.recorded[a], c.fresh, changed = true, true, true
		}
	}
	return changed
}

// begin makes the state that of the records on disk, and lets the files of all networks count again if others have an
// entry.
func (c *cachedPods) begin(n *Node, r *Report, present map[store.Attachment]podinfo.Cached) {
	if c.recorded == nil {
		c.recorded, c.seen = map[store.Attachment]bool{}, map[store.Attachment]time.Time{}
		pods, _, err := n.Dir.Pods()
		r.warn(err)
		for _, p := range pods {
			if x := present[p.Attachment]; p.Cached {
				c.recorded[p.Attachment], c.seen[p.Attachment], c.fresh = true, x.Written, true
			}
		}
	}
	var networks []string
	for _, list := range r.Sources.ConfDir.Conflists {
		if len(list.Entries) > 0 {
			networks = append(networks, list.Network, string(list.Doc))
		}
	}
	if !slices.Equal(networks, c.networks) {
		c.networks = networks
		maps.DeleteFunc(c.seen, func(a store.Attachment, _ time.Time) bool { return !c.recorded[a] })
	}
}

// recordCached records a pod. One that is recorded is replaced, as the runtime has written its file again.
func (n *Node) recordCached(a store.Attachment, x podinfo.Cached, replace bool) (bool, error) {
	if replace {
		if err := n.Dir.DetachCached(a); err != nil {
			return false, err
		}
	}
	return n.Dir.AttachCached(store.Pod{
		Attachment: a, At: x.Written.Sub(booted()).Nanoseconds(), Namespace: x.Namespace, Name: x.Name, Addresses: x.Addresses,
	})
}
