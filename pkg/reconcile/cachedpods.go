// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/podinfo"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// cachedPods records pods that started before the plugin entry was in the conflist, from the files of the runtime's cache.
type cachedPods struct {
	networks []string                    // that have a plugin entry
	seen     map[string]time.Time        // the files that were decided about, with their times
	recorded map[string]store.Attachment // of seen; nil before the first sync
	fresh    bool                        // some may not be in the rules yet
}

// CacheChanges returns a function that reports whether a sync may have pods of the runtime's cache to record or to forget since
// its last call: files came, went or changed whose attachments had no ADD of the plugin. It is for one goroutine.
func (n *Node) CacheChanges() func() bool {
	before, added := map[string]time.Time{}, map[string]time.Time{}
	return func() bool {
		files, err := podinfo.CacheFiles(n.CacheDir, booted())
		if err != nil {
			return true // the sync reports it
		}
		others := map[string]time.Time{}
		for file, written := range files {
			if added[file].Equal(written) {
				continue
			}
			if !before[file].Equal(written) {
				x, err := podinfo.ReadCached(filepath.Join(n.CacheDir, file))
				if err != nil {
					continue
				}
				if p, err := n.Dir.Pod(attachmentOf(x)); err == nil && p != nil && !p.Cached {
					added[file] = written
					continue
				}
			}
			others[file] = written
		}
		maps.DeleteFunc(added, func(file string, _ time.Time) bool { _, is := files[file]; return !is })
		changed := !maps.EqualFunc(before, others, time.Time.Equal)
		before = others
		return changed
	}
}

func attachmentOf(x podinfo.Cached) store.Attachment {
	return store.Attachment{Network: x.Network, ContainerID: x.ContainerID, IfName: x.IfName}
}

// syncCachedPods records the pods of networks with a plugin entry that have no record, and forgets those whose file or
// network namespace is gone. A file that was decided about counts again after it is written again, or another network has
// an entry: a DEL of the plugin comes before the runtime removes the file. It returns whether it changed records.
func (n *Node) syncCachedPods(r *Report) (changed bool) {
	c, src := n.cached, r.Sources
	if n.CacheDir == "" || r.OtherDataDir != nil || src.PluginFileErr != nil {
		return false
	}
	files, err := podinfo.CacheFiles(n.CacheDir, booted())
	if err != nil {
		r.warn(err)
		return false
	}
	c.begin(n, r, files)
	gone := func(file string) bool { _, is := files[file]; return !is }
	for file, a := range c.recorded {
		if _, err := podinfo.ReadCached(filepath.Join(n.CacheDir, file)); gone(file) || errors.Is(err, podinfo.ErrNoNetNS) {
			r.warn(n.Dir.DetachCached(a))
			delete(c.recorded, file)
			changed = true
		}
	}
	maps.DeleteFunc(c.seen, func(file string, _ time.Time) bool { return gone(file) })
	for file, written := range files {
		if c.seen[file].Equal(written) {
			continue
		}
		x, err := podinfo.ReadCached(filepath.Join(n.CacheDir, file))
		if err != nil {
			continue
		}
		list := src.PluginFile.Conflist(src.ConfDir, x.Network)
		if list == nil || src.PluginFile.Present && !x.SameConfig(list.Doc, config.PluginType) {
			c.seen[file] = written
			continue
		}
		recorded, err := n.recordCached(file, x, written)
		if r.warn(err); err != nil {
			continue // it is tried again
		}
		if c.seen[file] = written; recorded {
			c.fresh, changed = true, true
		}
	}
	return changed
}

// begin makes the state that of the records on disk, and lets the files of all networks count again if others have an
// entry.
func (c *cachedPods) begin(n *Node, r *Report, files map[string]time.Time) {
	if c.recorded == nil {
		c.recorded, c.seen = map[string]store.Attachment{}, map[string]time.Time{}
		pods, _, err := n.Dir.Pods()
		r.warn(err)
		for _, p := range pods {
			if file := p.Network + "-" + p.ContainerID + "-" + p.IfName; p.Cached {
				c.recorded[file], c.seen[file], c.fresh = p.Attachment, files[file], true
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
		maps.DeleteFunc(c.seen, func(file string, _ time.Time) bool { return c.recorded[file] == store.Attachment{} })
	}
}

// recordCached records a pod. One that is recorded is replaced, as the runtime has written its file again.
func (n *Node) recordCached(file string, x podinfo.Cached, written time.Time) (recorded bool, err error) {
	a := attachmentOf(x)
	if n.cached.recorded[file] == a {
		if err := n.Dir.DetachCached(a); err != nil {
			return false, err
		}
	}
	recorded, err = n.Dir.AttachCached(store.Pod{
		Attachment: a, At: written.Sub(booted()).Nanoseconds(), Namespace: x.Namespace, Name: x.Name, Addresses: x.Addresses,
	})
	if recorded {
		n.cached.recorded[file] = a
	}
	return recorded, err
}
