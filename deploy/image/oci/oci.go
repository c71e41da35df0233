// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// File is one entry of a layer. It belongs to root. Mode has the permissions, and fs.ModeDir for a directory;
// a symbolic link leads to Link. Name is relative to the image's root; a slash at its beginning does not matter.
type File struct {
	Name string
	Mode fs.FileMode
	Data []byte
	Link string
}

// Image is a Linux image for one architecture. Name is a whole reference,
// registry/repository:tag. Arch is as in GOARCH. The lowest layer comes first;
// directories that nothing declares are made with mode 0755.
type Image struct {
	Name, Arch           string
	Layers               [][]File
	Entrypoint, Cmd, Env []string
	WorkingDir           string
	Labels               map[string]string
}

// annotationName is what runtimes of CRI call an image: containerd's annotation has the
// whole name, that of the specification the tag alone.
const annotationName = "io.containerd.image.name"

// Write writes an archive that holds one image, or the image index of images with the same name for different
// architectures. Its bytes do not depend on when or where it is made.
func Write(w io.Writer, images ...Image) error {
	name := images[0].Name
	tag := name[strings.LastIndexByte(name, ':')+1:]
	if tag == name || strings.Contains(tag, "/") { // the colon precedes a port
		return fmt.Errorf("image name %q has no tag; write it as registry/repository:tag", name)
	}
	blobs := blobs{}
	var manifests []v1.Descriptor
	for _, image := range images {
		d, err := blobs.addImage(image)
		if err != nil {
			return fmt.Errorf("write image %s for %s: %w", name, image.Arch, err)
		}
		manifests = append(manifests, d)
	}
	one := manifests[0]
	if len(manifests) > 1 {
		var err error
		if one, err = blobs.addJSON(v1.MediaTypeImageIndex, index(manifests...)); err != nil {
			return fmt.Errorf("write image %s: %w", name, err)
		}
	}
	one.Annotations = map[string]string{annotationName: name, v1.AnnotationRefName: tag}
	if err := blobs.write(w, index(one)); err != nil {
		return fmt.Errorf("write image archive: %w", err)
	}
	return nil
}

func index(manifests ...v1.Descriptor) v1.Index {
	return v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: manifests}
}

// blobs are the contents of an archive by their SHA-256, in hexadecimal.
type blobs map[string][]byte

func (b blobs) add(mediaType string, data []byte) v1.Descriptor {
	d := digestOf(data)
	b[d.Encoded()] = data
	return v1.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(data))}
}

// digestOf hashes by itself: package digest knows only the hashes that a program links.
func digestOf(data []byte) digest.Digest {
	sum := sha256.Sum256(data)
	return digest.NewDigestFromBytes(digest.SHA256, sum[:])
}

func (b blobs) addJSON(mediaType string, value any) (v1.Descriptor, error) {
	data, err := json.Marshal(value)
	return b.add(mediaType, data), err
}

// addImage adds the blobs of one image and returns the descriptor of its manifest.
func (b blobs) addImage(image Image) (v1.Descriptor, error) {
	epoch := time.Unix(0, 0).UTC()
	c := v1.Image{
		Created: &epoch, Platform: v1.Platform{Architecture: image.Arch, OS: "linux"},
		Config: v1.ImageConfig{Env: image.Env, Entrypoint: image.Entrypoint, Cmd: image.Cmd, WorkingDir: image.WorkingDir, Labels: image.Labels},
		RootFS: v1.RootFS{Type: "layers"},
	}
	m := v1.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest}
	for _, files := range image.Layers {
		var layer, packed bytes.Buffer
		zip := gzip.NewWriter(&packed)
		if err := errors.Join(writeTar(io.MultiWriter(&layer, zip), withParents(files)), zip.Close()); err != nil {
			return v1.Descriptor{}, err
		}
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, digestOf(layer.Bytes()))
		m.Layers = append(m.Layers, b.add(v1.MediaTypeImageLayerGzip, packed.Bytes()))
	}
	var err error
	if m.Config, err = b.addJSON(v1.MediaTypeImageConfig, c); err != nil {
		return v1.Descriptor{}, err
	}
	d, err := b.addJSON(v1.MediaTypeImageManifest, m)
	d.Platform = &c.Platform
	return d, err
}

// write writes the layout as a tar: its marker, the index, the blobs.
func (b blobs) write(w io.Writer, top v1.Index) error {
	document, err := json.Marshal(top)
	if err != nil {
		return err
	}
	entries := []File{
		{Name: v1.ImageLayoutFile, Mode: 0o644, Data: []byte(`{"imageLayoutVersion":"` + v1.ImageLayoutVersion + `"}`)},
		{Name: v1.ImageIndexFile, Mode: 0o644, Data: document},
		{Name: v1.ImageBlobsDir, Mode: fs.ModeDir | 0o755},
		{Name: v1.ImageBlobsDir + "/sha256", Mode: fs.ModeDir | 0o755},
	}
	for _, hash := range slices.Sorted(maps.Keys(b)) {
		entries = append(entries, File{Name: v1.ImageBlobsDir + "/sha256/" + hash, Mode: 0o644, Data: b[hash]})
	}
	return writeTar(w, entries)
}

// withParents returns the files sorted, with the directories above them.
func withParents(files []File) []File {
	byName := map[string]File{}
	for _, f := range files {
		f.Name = strings.TrimPrefix(f.Name, "/")
		byName[f.Name] = f
	}
	for name := range maps.Clone(byName) {
		for above := path.Dir(name); above != "."; above = path.Dir(above) {
			if _, known := byName[above]; !known {
				byName[above] = File{Name: above, Mode: fs.ModeDir | 0o755}
			}
		}
	}
	return slices.SortedFunc(maps.Values(byName), func(a, b File) int { return cmp.Compare(a.Name, b.Name) })
}

// writeTar writes files without any property of the build machine.
func writeTar(w io.Writer, files []File) error {
	archive := tar.NewWriter(w)
	for _, f := range files {
		h := &tar.Header{Typeflag: tar.TypeReg, Name: f.Name, ModTime: time.Unix(0, 0), Mode: int64(f.Mode.Perm()), Size: int64(len(f.Data)), Linkname: f.Link}
		if f.Link != "" {
			h.Typeflag = tar.TypeSymlink
		}
		if f.Mode.IsDir() {
			h.Typeflag, h.Name = tar.TypeDir, f.Name+"/"
		}
		if err := archive.WriteHeader(h); err != nil {
			return fmt.Errorf("write header of %s: %w", f.Name, err)
		}
		if _, err := archive.Write(f.Data); err != nil {
			return fmt.Errorf("write %s: %w", f.Name, err)
		}
	}
	return archive.Close()
}
